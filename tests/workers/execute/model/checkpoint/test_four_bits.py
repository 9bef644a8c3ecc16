"""Checkpoints stored in four bits, compared with the same weights in a plain checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import prove
from tests.workers.execute.model.checkpoint import four_bit_checkpoints
from tests.workers.execute.model.checkpoint.four_bit_checkpoints import LAYOUTS, SCHEME, SIZES, gptq, make_pair
from tests.workers.execute.model.native.decoders import (
    NUM_STATE_ROWS,
    PAGE_SIZE,
    change_config,
    changed_tensors,
    in_four_bits,
    in_sixteenths,
    make_checkpoint,
    make_inputs,
    pack,
)
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.memory import Arena
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.checkpoint.stored_weights import open_tensors
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.model.native.build import NativeModel, NativeSetting, load_proven
from triptych.workers.execute.model.native.proven import load_native
from triptych.workers.execute.model.spec.decoder import Unsupported
from triptych.workers.execute.model.tokenizer import load_tokenizer


def load(folder: Path, quantization: str = "none", dtype: str = "auto") -> NativeModel:
    setting = NativeSetting(quantization=quantization, page_size=PAGE_SIZE, threads=2, progress=no_progress)
    return load_native(folder, load_tokenizer(folder), dtype=dtype, setting=setting)


def logits(model: NativeModel) -> npt.NDArray[np.float32]:
    tokens = np.random.default_rng(1).integers(3, 60, 60, dtype=np.int32)
    decoder = model.make_decoder(8, 128, NUM_STATE_ROWS, Arena)
    return decoder.run(make_inputs([(tokens, 0, len(tokens))], num_pages=8)).logits.copy()


@pytest.mark.parametrize(
    ("family", "layout"),
    # The head of GPT-NeoX has another name, and the dt of Bamba are not kept in four bits.
    [*product(["llama", "phi3"], LAYOUTS), ("gpt_neox", "gptq"), ("bamba", "awq"), ("youtu", "gptq")],
)
def test_tokens_equal_the_plain_checkpoint_in_four_bits(family: str, layout: str, tmp_path: Path) -> None:
    stored, plain = make_pair(family, layout, tmp_path)
    model, expected = load(stored), load(plain, "int4")
    assert (model.backend, model.dtype) == (f"native int4 on {available_levels()[0]}", torch.bfloat16)
    assert np.array_equal(logits(model), logits(expected))
    assert model.proof.facts == expected.proof.facts


@pytest.mark.parametrize(("family", "layout"), [("llama", "gptq"), ("llama", "awq"), ("youtu", "gptq")])
def test_groups_of_32_are_kept(family: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(four_bit_checkpoints, "GROUP", 32)
    stored, plain = make_pair(family, layout, tmp_path, group_size=32)
    model, expected = load(stored), load(plain, "int4")
    assert model.backend == f"native int4 on {available_levels()[0]}"
    assert np.array_equal(logits(model), logits(expected))


# As Qwen3.5 is published, with attention and shared experts in 16 bits, or DeepSeek, with one of two merged matrices.
@pytest.mark.parametrize(
    ("family", "plain_part"),
    [
        ("llama", "self_attn"),
        ("youtu", "kv_a_proj_with_mqa"),
        ("qwen2_moe", "mlp.shared_expert"),
        ("qwen2_moe", "experts.1"),
    ],
)
def test_matrices_that_are_not_in_four_bits_get_eight(family: str, plain_part: str, tmp_path: Path) -> None:
    stored, plain = make_pair(family, "awq", tmp_path)
    expected, tensors = logits(load(stored)), load_file(plain / "model.safetensors")
    with changed_tensors(stored) as parts:
        for name in [name for name in parts if f"{plain_part}." in name and not name.endswith(("bias", "norm.weight"))]:
            weight = f"{name.rpartition('.')[0]}.weight"
            del parts[name]
            parts[weight] = tensors[weight].half()
    found = logits(load(stored))
    # On average, as a few tokens may choose other experts.
    assert 0 < np.abs(found - expected).mean() < 0.05 * np.abs(expected).mean()


@pytest.mark.parametrize(("size", "expected"), [(32, Format.FINE_INT4), (64, Format.INT4), (None, Format.INT4)])
def test_weights_rounded_in_groups_of_32_before_are_not_rounded_again(
    size: int | None, expected: Format, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("llama", tmp_path, **SIZES)
    if size:
        in_four_bits(checkpoint, size)
    weights = pack(checkpoint, available_levels()[0], Format.INT4)
    assert {Format(weights.layers[0].qkv.format), Format(weights.layers[-1].down.format)} == {expected}
    tensors = load_file(checkpoint / "model.safetensors")
    exact = [torch.equal(unpack(), tensors[name]) for name, unpack in weights.quantised().items()]
    assert all(exact) if size else not any(exact)


def test_who_serves_weights_rounded_before_in_more_bits_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    checkpoint = make_checkpoint("llama", tmp_path, **SIZES)
    pack(checkpoint, available_levels()[0], Format.BFLOAT16)
    assert "--quantization int4" not in caplog.text
    pack(in_four_bits(checkpoint, 32), available_levels()[0], Format.BFLOAT16)
    assert "--quantization int4" in caplog.text


def test_head_may_have_four_bits_too(tmp_path: Path) -> None:
    stored, plain = make_pair("llama", "gptq", tmp_path)
    expected = logits(load(plain, "int4"))
    with changed_tensors(stored) as tensors:
        head = in_sixteenths(tensors.pop("lm_head.weight"))
        scales = (head[:, 1] / 7).numpy().reshape(-1, 1)  # one group; 0 stands for eight of them
        numbers = np.rint(head.numpy() / scales).astype(np.int64) + 8
        parts = gptq(np.clip(numbers, 0, 15), scales, np.full_like(scales, 8, dtype=np.int64))
        tensors |= {f"lm_head.{part}": values for part, values in parts.items()}
    found = logits(load(stored))
    assert np.abs(found - expected).max() < 0.4 * np.abs(expected).max()


def test_proven_checkpoint_starts_again(tmp_path: Path) -> None:
    stored, _ = make_pair("llama", "awq", tmp_path)
    model = load(stored)
    again = load_proven(
        stored,
        model.proof,
        NativeSetting(quantization="int4", page_size=PAGE_SIZE, threads=1, progress=no_progress),
    )
    assert np.array_equal(logits(again), logits(model))


@pytest.mark.parametrize(("layout", "settings", "reason"), [
    ("gptq", {"bits": 8}, "have 8 bits, the kernels support 4"),
    ("gptq", {"bits": "4"}, "have '4' bits, the kernels support 4"),
    ("gptq", {"group_size": 16}, "groups of 16 inputs, which is not a multiple of 32"),
    ("gptq", {"group_size": "128"}, "groups of '128' inputs, which is not a multiple of 32"),
    ("gptq", {"checkpoint_format": "marlin"}, "quantised by gptq marlin"),
    ("awq", {"version": "gemv"}, "quantised by awq gemv"),
    ("awq", {"quant_method": "bitsandbytes"}, "quantised by bitsandbytes"),
    ("compressed-tensors", {"format": "int-quantized"}, "quantised by compressed-tensors int-quantized"),
    ("compressed-tensors", {"format": "float-quantized"}, "not as 8-bit floating point"),
    ("awq", {"version": None, "checkpoint_format": "gemv"}, "quantised by awq gemv"),
    ("auto-round", {"packing_format": "auto_round:fp8_static"}, "quantised by auto-round auto_round:fp8_static int"),
    ("auto-round", {"data_type": "mx_fp"}, "quantised by auto-round auto_round mx_fp"),
    ("auto-round", {"act_bits": 8}, "has quantised its activations"),
    ("compressed-tensors", {"config_groups": {"a": SCHEME, "b": {"weights": {**SCHEME["weights"], "type": "float"}}}},
     "not quantised to integers"),
    ("compressed-tensors", {"config_groups": {"a": {**SCHEME, "output_activations": {"num_bits": 8}}}}, "not only in"),
    ("compressed-tensors", {"transform_config": {"config_groups": {"R4": {}}}}, "activations are transformed"),
])  # fmt: skip
def test_unsupported_setting_is_named(layout: str, settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    stored, _ = make_pair("llama", layout, tmp_path, **settings)
    with pytest.raises(Unsupported, match=reason):
        load(stored)


def test_family_with_transposed_matrices_is_named(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "quantization_config": LAYOUTS["gptq"][1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match="do not support the matrices of gpt2"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("order", ["reversed", "halves"])
def test_activation_order_of_inputs_is_refused(order: str, tmp_path: Path) -> None:
    stored, _ = make_pair("llama", "gptq", tmp_path)
    with changed_tensors(stored) as tensors:
        groups = tensors["model.layers.0.mlp.down_proj.g_idx"]
        groups[:] = groups.flip(0) if order == "reversed" else torch.arange(256) // 64
    with pytest.raises(Unsupported, match="desc_act"):
        load(stored)


def test_unset_group_indices_mean_the_default_order(tmp_path: Path) -> None:
    stored, plain = make_pair("llama", "gptq", tmp_path, desc_act=True)
    with changed_tensors(stored) as tensors:
        for name in tensors:
            if name.endswith("g_idx"):
                tensors[name] = torch.zeros_like(tensors[name])
    assert np.array_equal(logits(load(stored)), logits(load(plain, "int4")))


Change = Callable[[dict[str, torch.Tensor]], None]
DOWN = "model.layers.0.mlp.down_proj"
UNORDERED = [
    {"config_groups": {"a": {"weights": {**SCHEME["weights"], "actorder": order}}, "b": SCHEME}}
    for order in ("group", "dynamic", True)  # names of the same
]


def without(name: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors[name])})


@pytest.mark.parametrize(("layout", "settings", "change", "reason"), [
    ("gptq", {"desc_act": True}, without(f"{DOWN}.g_idx"), f"of {DOWN} are reordered, but it has no"),
    *(("compressed-tensors", settings, None, "are reordered, but it has no g_idx") for settings in UNORDERED),
    ("compressed-tensors", {}, without(f"{DOWN}.weight_zero_point"), f"but no matrix {DOWN}.weight_zero_point"),
    ("compressed-tensors", {}, changed(f"{DOWN}.weight_zero_point", lambda t: torch.cat([t, t[:1]])), "has zeros of"),
    ("gptq", {}, changed(f"{DOWN}.scales", torch.Tensor.int), f"{DOWN} has scales of int32, not floating point"),
    ("gptq", {"group_size": 64 << 64}, None, r"groups of 256 inputs have \(128, 1\)"),
    ("gptq", {}, lambda tensors: tensors.update({f"{DOWN}.weight": torch.ones(128, 256)}), f"has both {DOWN}.qweight"),
])  # fmt: skip
def test_contradictions_between_config_and_tensors_are_reported(
    layout: str, settings: dict[str, Any], change: Change | None, reason: str, tmp_path: Path
) -> None:
    stored, _ = make_pair("llama", layout, tmp_path, **settings)
    if change is not None:
        with changed_tensors(stored) as tensors:
            change(tensors)
    with pytest.raises(ConfigError, match=reason):
        load(stored)


def test_unknown_part_is_refused(tmp_path: Path) -> None:
    stored, _ = make_pair("llama", "awq", tmp_path)
    with changed_tensors(stored) as tensors:
        tensors[f"{DOWN}.rotation"] = torch.eye(256)
    with pytest.raises(Unsupported, match=f"differ from its config, {DOWN}.rotation first"):
        load(stored)


def test_embedding_in_four_bits_is_refused(tmp_path: Path) -> None:
    stored, _ = make_pair("llama", "gptq", tmp_path)
    with changed_tensors(stored) as tensors:
        num_outputs, num_inputs = tensors.pop("model.embed_tokens.weight").shape
        ones = np.ones((num_outputs, 1), np.int64)
        parts = gptq(ones.repeat(num_inputs, axis=1), ones, ones)
        tensors |= {f"model.embed_tokens.{part}": values for part, values in parts.items()}
    with pytest.raises(Unsupported, match="its embedding has 4 bits"):
        load(stored)


def test_damaged_tensor_is_named(tmp_path: Path) -> None:
    stored, _ = make_pair("llama", "awq", tmp_path)
    with pytest.raises(Unsupported, match="four bits already, and quantization is int8"):
        load(stored, "int8")
    with changed_tensors(stored) as tensors:
        name = "model.layers.0.mlp.down_proj.scales"
        tensors[name] = tensors[name][:1].clone()
    with pytest.raises(ConfigError, match=r"mlp.down_proj has scales of shape \(128, 1\), groups of 128 inputs have"):
        load(stored)
    with changed_tensors(stored) as tensors:
        del tensors[name]
    with pytest.raises(ConfigError, match=r"has model.layers.0.mlp.down_proj.qweight, but no matrix .*scales"):
        load(stored)
    change_config(stored, quantization_config={**LAYOUTS["compressed-tensors"][1], "config_groups": {"a": {}}})
    with pytest.raises(ConfigError, match=r"quantization_config in .* is damaged"):
        load(stored)


def test_reason_of_the_kernels_is_reported_if_transformers_cannot_load_it_either(tmp_path: Path) -> None:
    stored, _ = make_pair("llama", "gptq", tmp_path, group_size=16)
    with pytest.raises(ConfigError, match=r"cannot load .*; nor can it run on the compiled kernels: .* groups of 16"):
        prove(stored)
