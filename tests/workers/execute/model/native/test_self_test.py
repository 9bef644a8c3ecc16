"""Which differences from transformers make the compiled decoder unusable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from tests.tiny import needs_states
from tests.workers.execute.kernels.levels import load_cached
from tests.workers.execute.model.native.decoders import changed_tensors, make_checkpoint
from triptych.protocol.arrays import Int32
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.checkpoint.mapped import Checkpoint
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.model.guard import oracle
from triptych.workers.execute.model.guard.probe import random_sequences
from triptych.workers.execute.model.native import self_test as native_self_test
from triptych.workers.execute.model.native.self_test import check_native
from triptych.workers.execute.model.native.weights import PackedWeights
from triptych.workers.execute.model.spec.decoder import Unsupported
from triptych.workers.execute.model.spec.describe import describe_decoder
from triptych.workers.execute.model.spec.ropes import find_ropes
from triptych.workers.execute.model.states import StateLedger
from triptych.workers.execute.step import StepCut


@pytest.fixture
def sharp(tmp_path: Path) -> Path:
    """A checkpoint with so large scores that transformers in bfloat16 is half a logit off its own float32."""
    folder = make_checkpoint("qwen3", tmp_path / "sharp")
    with changed_tensors(folder) as tensors:
        for name in tensors:
            tensors[name] = (tensors[name] * (8 if "_norm." in name and "self_attn" in name else 1)).to(torch.bfloat16)
    return folder


def check(
    folder: Path, format_: Format = Format.BFLOAT16, described: dict[str, Any] | None = None, **overrides: Any
) -> float:
    """``overrides`` change the config that transformers gets, ``described`` the description that the kernels get."""
    library, tensors = load_cached(available_levels()[0]), Checkpoint(folder)
    spec = replace(describe_decoder(AutoConfig.from_pretrained(folder), tensors.shapes()), **described or {})
    weights = PackedWeights(spec, tensors, library=library, format_=format_, num_threads=1, progress=no_progress)
    config = AutoConfig.from_pretrained(folder, **overrides)
    return check_native(library, weights, config, tensors, ropes=find_ropes(config), num_threads=1)


def test_rounding_sensitive_model_is_compared_with_float32(sharp: Path) -> None:
    """The kernels keep more precision than transformers, so differing from its rounding is not their error."""
    assert 0.1 < check(sharp) < 0.4


def test_wrong_kernel_is_detected_there_too(sharp: Path) -> None:
    with pytest.raises(Unsupported, match="its logits differ from transformers' by"):
        check(sharp, rms_norm_eps=0.5)


@needs_states
def test_experts_between_which_rounding_decides_may_be_others(tmp_path: Path) -> None:
    """Delta rules leave much to rounding here, also for transformers' own routers: its logits are twice as far off."""
    folder = make_checkpoint("qwen3_next", tmp_path)
    assert 0.1 < check(folder) < 0.15
    with pytest.raises(Unsupported, match="its logits differ from transformers' by"):
        check(folder, norm_topk_prob=False)
    with pytest.raises(Unsupported, match="its logits differ from transformers' by"):
        check(folder, described={"has_sigmoid_routers": True})


@pytest.fixture
def sharp_in_float32(tmp_path: Path) -> Path:
    """A checkpoint with so large scores that transformers in float32 is off its own float64 by twice the limit."""
    heads = {"num_attention_heads": 14, "hidden_size": 224, "attention_multiplier": 1.0}
    return make_checkpoint("granite", tmp_path / "sharp", **heads, initializer_range=0.3)


def test_model_sensitive_to_rounding_in_float32_is_compared_with_float64(sharp_in_float32: Path) -> None:
    assert check(sharp_in_float32, Format.FLOAT32) < 1e-3


def test_small_error_is_detected_there_too(sharp_in_float32: Path) -> None:
    with pytest.raises(Unsupported, match=r"its logits differ from transformers' by .* the limit is 0\.0001"):
        check(sharp_in_float32, Format.FLOAT32, residual_multiplier=0.3003)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("granite", {"attention_multiplier": 0.55}),
        ("granite", {"residual_multiplier": 0.315}),
        ("granite", {"embedding_multiplier": 6.3}),
        ("granite", {"logits_scaling": 7.35}),
        ("gemma3_text", {"query_pre_attn_scalar": 231}),
        ("cohere", {"logit_scale": 0.315}),
    ],
)
def test_factor_that_is_wrong_by_a_few_percent_is_detected_in_bfloat16(
    family: str, wrong: dict[str, Any], tmp_path: Path
) -> None:
    """Its logits differ by less than rounding makes those of other models differ, but all of them do."""
    folder = make_checkpoint(family, tmp_path, dtype=torch.bfloat16)
    assert check(folder) < 0.1
    with pytest.raises(Unsupported, match="its logits"):
        check(folder, **wrong)


def test_one_token_may_be_rounded_to_nothing_in_four_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One channel of it is so large that the others of its group are zeros: SmolLM2 and others have such a token."""
    folder = make_checkpoint("llama", tmp_path)
    with changed_tensors(folder) as tensors:
        embedding = tensors["model.embed_tokens.weight"]
        token_id = random_sequences(len(embedding))[0][1]
        embedding[token_id, 3] *= 30
    monkeypatch.setitem(native_self_test._TOLERANCES, Format.INT4, 0.12)
    assert check(folder, Format.INT4) < 0.12
    monkeypatch.setattr(native_self_test, "_ROUNDING_OUTLIERS", 0.0)
    with pytest.raises(Unsupported, match=r"by 0\.13 of the greatest"):
        check(folder, Format.INT4)


def test_first_comparison_decides_if_memory_for_float32_is_lacking(
    sharp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "available_bytes", lambda device: 0)
    with pytest.raises(Unsupported, match=r"the limit is 0\.1"):
        check(sharp)


@pytest.mark.parametrize("format_", [Format.FLOAT32, Format.BFLOAT16])
def test_other_models_are_compared_once(format_: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    monkeypatch.setattr(oracle, "available_bytes", lambda device: 0)
    assert check(folder, format_) < 0.1


@pytest.mark.parametrize(
    "wrong",
    [{"head_dim": None}, {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}],
    ids=["modules cannot be made", "modules cannot run"],
)
def test_config_that_transformers_cannot_use_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path)
    with pytest.raises(Unsupported, match="transformers cannot compute it"):
        check(folder, Format.FLOAT32, **wrong)


def test_decoder_that_weights_experts_otherwise_is_refused(tmp_path: Path) -> None:
    """transformers follows the decoder's choices of experts, but not the weights that it gives them."""
    folder = make_checkpoint("qwen3_moe", tmp_path, norm_topk_prob=False)
    assert check(folder, Format.FLOAT32) < 1e-4
    with pytest.raises(Unsupported, match="its logits differ from transformers' by"):
        check(folder, Format.FLOAT32, norm_topk_prob=True)


@pytest.mark.parametrize(
    "described",
    [{"has_sigmoid_routers": False}, {"num_group_tops": 1}, {"num_expert_groups": 1, "num_chosen_groups": 1}],
    ids=["scores", "scores of groups", "groups"],
)
def test_decoder_that_chooses_experts_otherwise_is_refused(described: dict[str, Any], tmp_path: Path) -> None:
    """It may choose like transformers by chance, so transformers' own choices are compared with the description."""
    folder = make_checkpoint("deepseek_v3", tmp_path, n_group=4, topk_group=2)
    assert check(folder, Format.FLOAT32) < 1e-4
    with pytest.raises(Unsupported, match="its logits differ from transformers' by"):
        check(folder, Format.FLOAT32, described)


@pytest.mark.parametrize("lost", ["all", "before one token"])
def test_decoder_that_loses_states_is_refused(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison with transformers would not detect it for one token, because some tokens may differ."""
    folder, begin_step = make_checkpoint("qwen3_5_text", tmp_path), StateLedger.begin_step

    def forget(ledger: StateLedger, cut: StepCut) -> Int32:
        reads, zeros = begin_step(ledger, cut), ledger.num_rows - 1
        return np.where((cut.lengths == 1) | (lost == "all"), zeros, reads)

    assert check(folder) < 0.1
    monkeypatch.setattr(StateLedger, "begin_step", forget)
    with pytest.raises(Unsupported, match="its logits change when its tokens are computed in one step"):
        check(folder)
