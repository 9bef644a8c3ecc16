"""Recurrent layers on the compiled decoder: transformers' results, with the same bits in any chunks and batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.adapters import ALL_LINEAR, make_adapter, merge, write_adapter
from tests.tiny import needs_states
from tests.workers.execute.model.native.decoders import (
    FEW_PAGES,
    PLAIN_FORMATS,
    NativeEngine,
    changed_tensors,
    in_four_bits,
    levels_and_formats,
    make_checkpoint,
    make_inputs,
    make_request,
    make_small_decoder,
    over_levels,
    run_chunks,
)
from tests.workers.execute.model.native.logits import (
    NUM_TOKENS,
    assert_same_bits_in_every_step,
    exact_logits,
    random_tokens,
)
from tests.workers.execute.model.native.test_lora import make_adapted
from tests.workers.execute.model.native.test_lora import run_chunks as run_adapted
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.loading import check_speculation
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.checkpoint.mapped import Checkpoint
from triptych.workers.execute.model.spec.describe import describe_decoder
from triptych.workers.execute.scheduling.sequence import Sequence

Floats = npt.NDArray[np.float32]

WITH_EXPERTS = "qwen3_5_moe_text"
CONVOLVED = "lfm2"
SPACED, BESIDE = "granitemoehybrid", "falcon_h1"  # the latter has state spaces beside attention
FAMILY, NUM_PAGES, MAX_TOKENS = "qwen3_5_text", FEW_PAGES, 24
TOLERANCES = {Format.FLOAT32: 2e-5, Format.BFLOAT16: 0.1, Format.INT8: 0.3, Format.INT4: 0.3}  # of the greatest logit
OF_DELTA_RULES = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj")
OF_CONVOLUTIONS = ("in_proj", "w1", "w2", "w3")
DELTA_RULE, ATTENDS = "linear_attention", "full_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "short convolutions": {
        "family": CONVOLVED, "hidden_size": 100, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
        "layer_types": [ATTENDS, "conv", "conv"], "tie_word_embeddings": True,
    },
    "heads of 128": {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 64, "hidden_size": 96},
    "odd sizes": {
        "hidden_size": 100, "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 48,
        "linear_value_head_dim": 80, "linear_conv_kernel_dim": 2, "head_dim": 48, "intermediate_size": 70,
    },
    "biases": {"attention_bias": True, "head_dim": 64},
    "state spaces": {
        "family": SPACED, "hidden_size": 128, "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 128,
        "layer_types": [DELTA_RULE, DELTA_RULE, ATTENDS], "num_local_experts": 0, "mamba_proj_bias": True,
        "mamba_conv_bias": False,
    },
    "state spaces in groups": {
        "family": "bamba", "hidden_size": 80, "mamba_n_heads": 2, "mamba_d_head": 80, "mamba_d_state": 48,
        "mamba_d_conv": 2, "attn_layer_indices": [0], "mlp_bias": True,
    },
    "separate layers": {
        "family": "nemotron_h", "layers_block_type": ["moe", ATTENDS, "mlp", DELTA_RULE, "mlp"], "hidden_size": 80,
        "moe_intermediate_size": 33, "use_bias": True, "n_groups": 4, "norm_topk_prob": False,
    },
    "state spaces beside attention": {"family": BESIDE, "hidden_size": 100, "projectors_bias": True},
    "normed state spaces beside attention": {
        "family": BESIDE, "mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_n_groups": 2,
        "attention_in_multiplier": 1.0, "attention_bias": True, "mlp_bias": True,
    },
    "the last layer has one": {
        "num_hidden_layers": 2, "layer_types": [ATTENDS, DELTA_RULE], "tie_word_embeddings": True,
    },
}  # fmt: skip


def difference_of_most(found: Floats, exact: npt.NDArray[np.float64]) -> float:
    """For three quarters of the rows, relative to the greatest logit. For the others, where a key and a query are
    almost orthogonal, the sign of an output depends on the last bit: there transformers differs from itself.
    """
    return float(np.quantile(np.abs(found - exact).max(axis=1), 0.75) / np.abs(exact).max())


def test_all_tensors_of_recurrent_families_are_described(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(FAMILY, tmp_path)
    config, shapes = AutoConfig.from_pretrained(checkpoint), Checkpoint(checkpoint).shapes()
    spec = describe_decoder(config, shapes)
    assert spec.tensors() == shapes
    assert (spec.is_recurrent, spec.ropes, spec.rotary_dim) == ((True, True, True, False), (None, None, None, 0), 8)
    assert spec.has_qk_norm
    assert not any("in_proj_a" in name or "in_proj_b" in name for name in spec.matrices())
    guessing = {**shapes, "mtp.layers.0.mlp.up_proj.weight": (96, 64)}  # predicts the token after the next one
    assert describe_decoder(config, guessing) == spec


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers_in_float64(shape: str, tmp_path: Path) -> None:
    sizes = {"initializer_range": 0.1, "family": FAMILY, **SHAPES[shape]}
    checkpoint, token_ids = in_four_bits(make_checkpoint(folder=tmp_path, **sizes)), random_tokens()
    exact = exact_logits(checkpoint, token_ids)  # even then, its delta rules compute in float32
    for level, format_ in levels_and_formats(list(SHAPES).index(shape)):
        found = run_chunks(make_small_decoder(checkpoint, level, format_), token_ids, [100, 1, 40, 9])
        assert difference_of_most(found, exact) < TOLERANCES[format_], f"{level} {format_.name}"


@pytest.mark.parametrize(
    ("family", "sizes"),
    [(FAMILY, {}), ("qwen3_next", {"mlp_only_layers": [0, 1, 2, 3]}), (CONVOLVED, {}), (BESIDE, {})],
)
def test_adapters_change_all_matrices(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"initializer_range": 0.1, "linear_num_value_heads": 6, **sizes}
    checkpoint, token_ids = in_four_bits(make_checkpoint(family, tmp_path / "model", **sizes)), random_tokens(60)
    adapter = make_adapter(tmp_path / "a", checkpoint, targets=(*ALL_LINEAR, *OF_DELTA_RULES, *OF_CONVOLUTIONS))
    merged = merge(checkpoint, adapter, tmp_path / "merged")
    exact = exact_logits(merged, token_ids)
    for format_ in PLAIN_FORMATS:
        decoder = make_adapted(checkpoint, [adapter], available_levels()[0], format_)
        adapted = run_adapted(decoder, token_ids, [40, 1, 19], 1)
        assert difference_of_most(adapted, exact) < TOLERANCES[format_], format_.name
        assert np.array_equal(run_adapted(decoder, token_ids, [1] * 30 + [30], 1), adapted)
        plain = run_chunks(make_small_decoder(checkpoint, available_levels()[0], format_), token_ids, [60])
        assert np.array_equal(run_adapted(decoder, token_ids, [60], 0), plain)
        assert difference_of_most(plain, exact) > TOLERANCES[Format.BFLOAT16], "the adapter has an effect"


@over_levels("family", [FAMILY, WITH_EXPERTS, CONVOLVED, BESIDE])
def test_logits_have_the_same_bits_in_any_chunks_and_batches(
    family: str, level: str, format_: Format, tmp_path: Path
) -> None:
    assert_same_bits_in_every_step(make_checkpoint(family, tmp_path), level, format_)


def test_adapters_change_the_shared_expert(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(WITH_EXPERTS, tmp_path / "model", num_experts_per_tok=6)  # all: none is nearly alike
    adapter = make_adapter(tmp_path / "a", checkpoint, targets=("gate_proj", "up_proj", "down_proj", "out_proj"))
    with pytest.raises(ConfigError, match=r"it changes model.layers.0.mlp.experts.0.down_proj, which is not a linear"):
        make_adapted(checkpoint, [adapter], available_levels()[0], Format.FLOAT32)
    updates = load_file(adapter / "adapter_model.safetensors")
    of_all = {name: tensor for name, tensor in updates.items() if ".experts." not in name}
    write_adapter(tmp_path / "b", of_all, r=8, lora_alpha=8)
    merged, token_ids = merge(checkpoint, tmp_path / "b", tmp_path / "merged"), random_tokens(60)
    exact = exact_logits(merged, token_ids)
    decoder = make_adapted(checkpoint, [tmp_path / "b"], available_levels()[0], Format.FLOAT32)
    assert difference_of_most(run_adapted(decoder, token_ids, [40, 1, 19], 1), exact) < TOLERANCES[Format.FLOAT32]
    assert difference_of_most(run_adapted(decoder, token_ids, [60], 0), exact) > 0.1, "the adapter has an effect"


def test_step_can_be_repeated_in_parts_too(tmp_path: Path) -> None:
    checkpoint, token_ids = make_checkpoint(FAMILY, tmp_path), random_tokens()
    decoder = make_small_decoder(checkpoint, available_levels()[0], Format.BFLOAT16)
    expected = run_chunks(decoder, token_ids, [NUM_TOKENS])
    run_chunks(decoder, token_ids, [20])
    step = make_inputs([(token_ids, 20, 9)], num_pages=NUM_PAGES)
    for _ in range(3):
        assert np.array_equal(decoder.run(step).logits, expected[20:29])
    assert np.array_equal(decoder.run(make_inputs([(token_ids, 29, 5)], num_pages=NUM_PAGES)).logits, expected[29:34])
    with pytest.raises(AssertionError, match="no state up to token"):
        decoder.run(make_inputs([(token_ids, 21, 9)], num_pages=NUM_PAGES))


@over_levels("family, value", [(FAMILY, math.inf), (FAMILY, math.nan), (CONVOLVED, math.nan), (BESIDE, math.nan)])
def test_nan_state_is_reported_and_ends_with_its_sequence(
    family: str, value: float, level: str, format_: Format, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 100, "tie_word_embeddings": False}
    checkpoint, token_ids = make_checkpoint(family, tmp_path, **sizes), random_tokens(40)
    with changed_tensors(checkpoint) as tensors:
        tensors["model.embed_tokens.weight"][5, 0] = value
    decoder = make_small_decoder(checkpoint, level, format_)
    expected = run_chunks(decoder, token_ids, [40])
    bad = token_ids.copy()
    bad[3] = 5
    for start, count in ((0, 20), (20, 1), (21, 2)):
        mates = [(token_ids, start, count), (bad, start, count)]
        outputs = decoder.run(make_inputs(mates, num_pages=NUM_PAGES))
        assert np.array_equal(outputs.logits[:count], expected[start : start + count])
        assert np.isnan(outputs.greatest[count:][max(3 - start, 0) :]).all(), outputs.greatest
    swapped = [(bad, 0, 3), (token_ids, 0, 40)]  # in the slot that held it
    assert np.array_equal(decoder.run(make_inputs(swapped, num_pages=NUM_PAGES)).logits[3:], expected)


Engines = Callable[[str, str, str], NativeEngine]


@pytest.fixture(scope="module", name="engines")
def fixture_engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    @cache
    def engine_of(family: str, dtype: str, quantization: str) -> NativeEngine:
        folder = tmp_path_factory.mktemp(family)
        checkpoint = make_checkpoint(family, folder / "checkpoint")
        return NativeEngine(checkpoint, folder, dtype=dtype, quantization=quantization)

    return engine_of


def requests() -> list[Sequence]:
    return [make_request(i, length, MAX_TOKENS) for i, length in enumerate((1, 7, 16, 45, 90))]


@pytest.mark.parametrize(("family", "dtype", "quantization"), [
    (FAMILY, "float32", "none"), (FAMILY, "bfloat16", "none"), (FAMILY, "bfloat16", "int8"),
    (FAMILY, "bfloat16", "int4"), (CONVOLVED, "bfloat16", "int8"),
    (WITH_EXPERTS, "bfloat16", "none"), (WITH_EXPERTS, "bfloat16", "int8"), (SPACED, "bfloat16", "int8"),
])  # fmt: skip
def test_batches_chunks_and_preemption_change_nothing(
    family: str, dtype: str, quantization: str, engines: Engines
) -> None:
    engine = engines(family, dtype, quantization)
    assert engine.card.backend.startswith("native")
    alone = [engine.run(request)[0] for request in requests()]
    for chunk in (1, 7, 512):
        assert engine.run(*requests(), prefill_chunk=chunk) == alone
    sequences = requests()
    assert engine.run(*sequences, num_pages=9, safety_margin=0.0) == alone
    assert sum(sequence.num_preemptions for sequence in sequences) > 0


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        (FAMILY, "float32", "none"),
        (FAMILY, "bfloat16", "none"),
        (CONVOLVED, "bfloat16", "int8"),
        (SPACED, "bfloat16", "none"),
    ],
)
def test_cached_prefix_changes_nothing(family: str, dtype: str, quantization: str, engines: Engines) -> None:
    """A sequence that starts from another's snapshot gets the same bits, wherever their prompts diverge."""
    engine = engines(family, dtype, quantization)

    def requests() -> list[Sequence]:
        made = [make_request(0, 90, MAX_TOKENS) for _ in range(4)]
        for index, request in enumerate(made):
            request.key, request.arrival = (index, 0), index
            request.tokens[50 + index : 90] = 9
        return made

    alone, again = engine.run(*requests(), num_snapshots=0), requests()
    assert engine.run(*again, prefix_cache=True, num_snapshots=4, prefill_chunk=40) == alone
    assert sum(request.num_cached_tokens > 0 for request in again) >= 2


def test_steps_do_not_overlap_and_speculation_is_refused(engines: Engines) -> None:
    engine = engines(FAMILY, "float32", "none")
    assert engine.card.keeps_states
    assert not engine.runner.overlaps
    check_speculation(SchedulerConfig(num_speculative_tokens=0), engine.runner, engine.card)
    with pytest.raises(ConfigError, match="the limit is 0: qwen3_5_text has recurrent layers") as refusal:
        check_speculation(SchedulerConfig(num_speculative_tokens=4), engine.runner, engine.card)
    assert refusal.value.param == "num_speculative_tokens"


def build(checkpoint: Path, *, draft: Path | None = None, **cache_options: Any) -> Any:
    """The runner and the model card."""
    return build_runner(
        ModelConfig(model="tiny", device="cpu", threads=1),
        CacheConfig(**{"num_pages": 16, **cache_options}), SchedulerConfig(max_num_seqs=4),
        model_dir=checkpoint, draft_folder=draft, run_dir=checkpoint.parent,
    )  # fmt: skip


def test_memory_for_states_is_subtracted_from_that_for_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(FAMILY, tmp_path / "model")
    heads, channels = 4 * 16 * 32, 2 * 2 * 16 + 4 * 32
    rows = 2 * 6 + 2 + 2  # of 6 live sequences, of snapshots, the trash row and the zero row
    states = 3 * rows * 4 * (heads + 3 * channels)
    page_bytes = 16 * 2 * 2 * 32 * 4  # keys and values of the only attention layer
    monkeypatch.setattr("triptych.workers.execute.model.sizing.available_bytes", lambda device: states + 9 * page_bytes)
    _, card = build(checkpoint, num_pages=None, max_kv_bytes=1 << 40, kv_memory_fraction=1.0)
    assert (card.backend, card.num_pages) == (f"native float32 on {available_levels()[0]}", 8)


def test_options_excluded_by_states_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(FAMILY, tmp_path / "model")
    with pytest.raises(ConfigError, match="host_pages is 8, the limit is 0: qwen3_5_text has recurrent"):
        build(checkpoint, host_pages=8)
    with pytest.raises(ConfigError, match="draft model: qwen3_5_text has recurrent layers"):
        build(make_checkpoint("llama", tmp_path / "other"), draft=checkpoint)


@needs_states
@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"family": "bamba", "mamba_d_state": 24}, "states of its state spaces have 24 channels"),
        ({"linear_key_head_dim": 8}, "keys of its delta rules have 8 channels"),
        ({"linear_value_head_dim": 24}, "values of its delta rules have 24 channels"),
        ({"linear_conv_kernel_dim": 9}, "its convolutions see 9 tokens"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "its convolutions' activation is gelu_pytorch_tanh"),
    ],
    ids=["state spaces", "keys", "values", "convolution", "activation"],
)
def test_transformers_runs_what_the_kernels_cannot(sizes: dict[str, Any], why: str, tmp_path: Path) -> None:
    _, card = build(make_checkpoint(folder=tmp_path / "model", **{"family": FAMILY, **sizes}))
    assert card.backend == "transformers with CpuAttention"
    assert card.keeps_states
    assert why in card.why_slow
