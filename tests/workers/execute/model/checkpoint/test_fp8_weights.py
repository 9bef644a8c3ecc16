"""Checkpoints in FP8, compared with plain ones of the dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.conftest import HAS_GPU
from tests.workers.execute.factories import make_scheduler, run
from tests.workers.execute.model.checkpoint.fp8_checkpoints import (
    ALL,
    BLOCK,
    FORMS,
    FP8,
    ODD,
    dequantised,
    in_fp8,
    make_fp8_pair,
    scheme,
    store_in_fp8,
)
from tests.workers.execute.model.checkpoint.test_four_bits import load, logits
from tests.workers.execute.model.checkpoint.test_text_part import make_seeing
from tests.workers.execute.model.fused.short_self_test import shorten_self_test
from tests.workers.execute.model.native.decoders import (
    PLAINLY,
    change_config,
    changed_tensors,
    greedy_choices,
    make_checkpoint,
    make_request,
)
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.checkpoint.stored_weights import open_for_modules, open_tensors
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.model.guard.oracle import Oracle, mapped_model
from triptych.workers.execute.model.spec.decoder import Unsupported
from triptych.workers.execute.model.spec.describe import describe_decoder
from triptych.workers.execute.scheduling.sequence import Sequence

MODELS: dict[str, dict[str, Any]] = {
    "llama": ODD,
    "qwen3": {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64},
    "ministral3": ODD,
    "qwen3_moe": {"hidden_size": 160, "moe_intermediate_size": 136},
    "mixtral": {"hidden_size": 136, "intermediate_size": 144},
}
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


def greedy_tokens(folder: Path, **options: Any) -> tuple[list[list[int]], ModelCard]:
    """Greedy tokens of three prompts, in one batch, with the checkpoint's runner."""
    runner, card = build_runner(
        ModelConfig(model=str(folder), **{"device": "cpu", "dtype": "float32", **options}),
        CacheConfig(num_pages=64), SchedulerConfig(max_num_seqs=4, prefill_chunk=32),
        model_dir=folder, run_dir=folder.parent,
    )  # fmt: skip
    requests = make_requests()
    outputs = run(Engine(make_scheduler(*requests, num_pages=64, page_size=16, max_model_len=512), runner))
    return [outputs[request.key] for request in requests], card


def expected(plain: Path, tokens: list[list[int]]) -> list[list[int]]:
    """What transformers chooses in float32, after these tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, **PLAINLY)
    return [greedy_choices(model, *each) for each in zip(make_requests(), tokens, strict=True)]


def make_requests() -> list[Sequence]:
    return [make_request(index, length, 8) for index, length in enumerate((1, 20, 45))]


@pytest.mark.parametrize("form", FORMS)
def test_tokens_equal_transformers_with_dequantised_weights(form: str, tmp_path: Path) -> None:
    stored, plain = make_fp8_pair("llama", form, tmp_path, **ODD)
    tokens, card = greedy_tokens(stored)
    assert card.backend == f"native float32 on {available_levels()[0]}"
    assert tokens == greedy_tokens(stored, backend="transformers")[0] == expected(plain, tokens)


# Forms differ in their scales, and families in what is stored: the test above has all forms, and experts are stacked.
@pytest.mark.parametrize(
    ("family", "form"), [*((family, "blocks") for family in MODELS), ("qwen3_moe", "tensors"), ("mixtral", "channels")]
)
def test_kernels_and_modules_give_the_same_tokens(family: str, form: str, tmp_path: Path) -> None:
    stored, plain = make_fp8_pair(family, form, tmp_path, **MODELS[family])
    tokens, card = greedy_tokens(stored)
    assert card.backend == f"native float32 on {available_levels()[0]}"
    assert card.num_parameters == sum(tensor.numel() for tensor in load_file(plain / "model.safetensors").values())
    by_modules, card = greedy_tokens(stored, backend="transformers")
    assert "transformers" in card.backend
    assert tokens == by_modules == expected(plain, tokens)


@pytest.mark.parametrize("options", [
    {"dtype": "bfloat16"}, {"dtype": "float32"}, {"quantization": "int8"}, {"quantization": "int4"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_logits_have_the_bits_of_the_plain_checkpoint(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Weights are rounded only once: to bfloat16, to 8 bits or to 4."""
    stored, plain = make_fp8_pair(family, "blocks", tmp_path, **MODELS[family])
    assert np.array_equal(logits(load(stored, **options)), logits(load(plain, **options)))


SIZES = st.integers(1, 300)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(SIZES, SIZES), block=st.sampled_from([(128, 128), (1, ALL), (ALL, ALL), (7, 33)]), data=st.data()
)
def test_every_weight_is_its_number_times_the_scale_of_its_block(
    shape: tuple[int, int], block: tuple[int, int], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, seed = tmp_path_factory.mktemp("weights"), data.draw(st.integers(0, 1 << 30))
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    numbers[(numbers & 127) == 127] = 0  # NaN
    scales = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1]), generator=generator)
    save_file({"a.weight": numbers.view(FP8), "a.weight_scale_inv": scales}, folder / "model.safetensors")
    size = [min(each, of) for each, of in zip(block, shape, strict=True)]
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": size}})
    )
    found = open_tensors(folder)["a.weight"]
    assert torch.equal(found, dequantised(numbers.view(FP8), scales, *block).float())


def test_scales_may_be_exponents_of_two(tmp_path: Path) -> None:
    stored, _ = make_fp8_pair("llama", "blocks", tmp_path, num_hidden_layers=1, **ODD)
    change_config(stored, quantization_config={"quant_method": "mxfp8", "modules_to_not_convert": ["lm_head"]})
    with changed_tensors(stored) as tensors:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            numbers = tensors[name.removesuffix("_scale_inv")]
            size = (len(numbers), -(-numbers.shape[1] // 32))
            tensors[name] = torch.randint(117, 121, size, dtype=torch.uint8)
    scales = torch.exp2(tensors[f"{DOWN}_scale_inv"].double() - 127)
    assert torch.equal(open_tensors(stored)[DOWN], dequantised(tensors[DOWN], scales, 1, 32).float())
    assert greedy_tokens(stored)[1].backend == f"native float32 on {available_levels()[0]}"


@pytest.mark.parametrize("type_", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu], ids=str)
def test_scales_may_have_other_dtypes(type_: torch.dtype, tmp_path: Path) -> None:
    stored, plain = make_fp8_pair("llama", "blocks", tmp_path, num_hidden_layers=1, **ODD)
    with changed_tensors(stored) as tensors, changed_tensors(plain) as wanted:
        numbers = tensors[DOWN]
        scales = tensors[f"{DOWN}_scale_inv"] = (tensors[f"{DOWN}_scale_inv"] * 1.3).to(type_)
        wanted[DOWN] = dequantised(numbers, scales.float(), BLOCK, BLOCK).float()
    assert torch.equal(open_tensors(stored)[DOWN], load_file(plain / "model.safetensors")[DOWN])


def test_experts_in_one_tensor_have_separate_blocks(tmp_path: Path) -> None:
    stored, _ = make_fp8_pair("llama", "blocks", tmp_path, num_hidden_layers=1)
    parts = [in_fp8(torch.randn(160, 200), BLOCK, BLOCK) for _ in range(3)]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    numbers = torch.stack([numbers.view(torch.uint8) for numbers, _ in parts]).view(FP8)
    with changed_tensors(stored) as tensors:
        tensors |= {name: numbers, f"{name}_scale_inv": torch.stack([scales for _, scales in parts])}
    wanted = [dequantised(*part, BLOCK, BLOCK).float() for part in parts]
    assert torch.equal(open_tensors(stored)[name], torch.stack(wanted))


def test_head_in_fp8_runs_too(tmp_path: Path) -> None:
    stored, plain = make_fp8_pair("llama", "blocks", tmp_path, **ODD)
    with changed_tensors(stored) as tensors, changed_tensors(plain) as wanted:
        numbers, scales = in_fp8(tensors["lm_head.weight"], BLOCK, BLOCK)
        tensors |= {"lm_head.weight": numbers, "lm_head.weight_scale_inv": scales}
        wanted["lm_head.weight"] = dequantised(numbers, scales, BLOCK, BLOCK).float()
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
        wanted["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].float()
    tokens, _ = greedy_tokens(stored)
    assert tokens == greedy_tokens(stored, backend="transformers")[0] == expected(plain, tokens)


def test_modelopt_s_separate_file_is_read(tmp_path: Path) -> None:
    stored, plain = make_fp8_pair("llama", "modelopt", tmp_path, **ODD)
    config = json.loads((stored / "config.json").read_text())
    del config["quantization_config"]
    (stored / "config.json").write_text(json.dumps(config))
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (stored / "hf_quant_config.json").write_text(json.dumps(settings))
    tokens, _ = greedy_tokens(stored)
    assert tokens == greedy_tokens(stored, backend="transformers")[0] == expected(plain, tokens)


def test_self_test_dequantises_a_weight_only_while_it_is_used(tmp_path: Path) -> None:
    stored, _ = make_fp8_pair("qwen3", "blocks", tmp_path, **MODELS["qwen3"])
    config, tensors = AutoConfig.from_pretrained(stored), open_tensors(stored)
    spec = describe_decoder(config, tensors.shapes())
    model = mapped_model(Oracle(config, spec, tensors, tensors.made(spec.matrices())), torch.bfloat16)
    lacking = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert lacking == set(spec.matrices())


def test_fused_decoder_uses_the_dequantised_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    shorten_self_test(monkeypatch)
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    stored, plain = make_fp8_pair("llama", "blocks", tmp_path, **ODD, **small)
    device = "cuda" if HAS_GPU else "cpu"
    tokens, card = greedy_tokens(stored, backend="fused", device=device)
    assert (card.backend, tokens) == ("fused float32", expected(plain, tokens))


def test_fused_decoder_quantises_again_per_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triptych.workers.execute.model.fused.weights import Format, FusedLoader

    stored, plain = make_fp8_pair("llama", "channels", tmp_path, num_hidden_layers=1, **ODD)
    with changed_tensors(plain) as wanted:
        wanted_weight = wanted[DOWN]
    tensors = open_tensors(stored)
    spec = describe_decoder(AutoConfig.from_pretrained(stored), tensors.shapes())
    loader = FusedLoader(
        spec, tensors, format_=Format(torch.float32, is_fp8=True), device=torch.device("cpu"),
        progress=no_progress,
    )  # fmt: skip
    down: Any = loader.load().layers[0].mlp
    found = down.down.weight.values.float() * down.down.weight.scales
    # The greatest of each output already has the greatest number, so nothing is rounded a second time.
    assert torch.allclose(found, wanted_weight, rtol=1e-6)


Change = Callable[[dict[str, torch.Tensor]], object]


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def nan_last(scales: torch.Tensor) -> torch.Tensor:
    scales[-1] = float("nan")
    return scales


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(("form", "change", "reason"), [
    ("blocks", lambda t: t.pop(f"{DOWN}_scale_inv"), f"{DOWN} is in FP8 and has 0 scales, not one: {DOWN}_scale_inv"),
    ("blocks", lambda t: t.update({f"{DOWN}_scale": torch.ones(2, 2)}), f"{DOWN} is in FP8 and has 2 scales"),
    ("blocks", changed(f"{DOWN}_scale_inv", lambda s: s[:1].clone()), rf"{DOWN}_scale_inv in .* has shape \(1, 2\), "),
    ("channels", changed(f"{DOWN}_scale", lambda s: s[:9].clone()), r"weights \(160, 200\) in blocks of 1 x all have "),
    ("blocks", changed(f"{DOWN}_scale_inv", nan_last), f"{DOWN}_scale_inv has scales that are not finite"),
    ("tensors", changed(f"{DOWN}_scale_inv", lambda s: s / 0), f"{DOWN}_scale_inv has scales that are not finite"),
    ("blocks", lambda t: t.update({NORM: t[NORM].to(FP8), f"{NORM}_scale_inv": torch.ones(1)}), "in blocks of .* none"),
    ("blocks", changed(f"{DOWN}_scale_inv", torch.Tensor.int), f"{DOWN}_scale_inv is of type I32, supported are:"),
    ("blocks", lambda t: t.update({f"{DOWN}_scale_2": torch.ones(1)}), f"has the tensor {DOWN}_scale_2"),
    ("blocks", lambda t: t.update({"lm_head.weight_scale": torch.ones(1)}), "has the tensor lm_head.weight_scale"),
    ("channels", lambda t: t.update({f"{DOWN}_zero_point": torch.ones(160, 1)}), f"the tensor {DOWN}_zero_point"),
    ("blocks", changed(DOWN, lambda t: t.float().to(torch.float8_e5m2)), "nobody knows|F8_E5M2"),
])  # fmt: skip
def test_damaged_or_unused_tensor_of_a_quantised_weight_is_named(
    backend: str, form: str, change: Change, reason: str, tmp_path: Path
) -> None:
    stored, _ = make_fp8_pair("llama", form, tmp_path, num_hidden_layers=1, **ODD)
    with changed_tensors(stored) as tensors:
        change(tensors)
    with pytest.raises(ConfigError, match=reason):
        greedy_tokens(stored, backend=backend)


FLOATS = scheme("channel")
GROUP = FLOATS["config_groups"]["group_0"]


@pytest.mark.parametrize("backend", ["auto", "transformers"])
@pytest.mark.parametrize(("changes", "reason"), [
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quantised by modelopt NVFP4"),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, "its experts are quantised by fp4"),
    ({"quant_method": "fp9"}, "quantised by fp9"),
    ({"quant_method": None}, "quantised by an unnamed method"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "quantization_config in .* is damaged"),
    ({"quant_method": "fp8", "weight_block_size": [128, "128"]}, "quantization_config in .* is damaged"),
    ({**FLOATS, "format": "mxfp8-quantized"}, "mxfp8-quantized"),
    ({**FLOATS, "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
    ({**FLOATS, "config_groups": {"a": GROUP, "b": {**GROUP, "format": "pack-quantized"}}}, "and pack-quantized"),
    ({**FLOATS, "config_groups": {"a": {"weights": {**GROUP["weights"], "symmetric": False}}}}, "not symmetric"),
    ({**FLOATS, "config_groups": {"a": {"weights": {**GROUP["weights"], "num_bits": 4}}}}, "not as 8-bit"),
    ({**FLOATS, "config_groups": {"a": {"weights": {**GROUP["weights"], "strategy": "token"}}}}, "by token"),
    ({**FLOATS, "transform_config": {"config_groups": {"R4": {}}}}, "transformed"),
    ({**FLOATS, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
], ids=str)  # fmt: skip
def test_other_quantisations_are_refused_by_name(backend: str, changes: Any, reason: str, tmp_path: Path) -> None:
    stored, _ = make_fp8_pair("llama", "channels", tmp_path, num_hidden_layers=1)
    change_config(stored, quantization_config=changes)
    with pytest.raises(ConfigError, match=reason):
        greedy_tokens(stored, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_fp8_without_a_description_in_the_config_is_refused(backend: str, tmp_path: Path) -> None:
    stored, _ = make_fp8_pair("llama", "blocks", tmp_path, num_hidden_layers=1)
    change_config(stored, quantization_config=None)
    with pytest.raises(ConfigError, match="is of type F8_E4M3, and its config does not describe that format"):
        greedy_tokens(stored, backend=backend)


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_double_precision_is_not_a_quantisation(backend: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "plain", num_hidden_layers=1)
    tokens, _ = greedy_tokens(checkpoint)
    assert tokens == expected(checkpoint, tokens)
    with changed_tensors(checkpoint) as tensors:
        tensors.update({name: tensor.double() for name, tensor in tensors.items()})
    assert greedy_tokens(checkpoint, backend=backend)[0] == tokens


def test_scales_that_transformers_does_not_use_are_refused(tmp_path: Path) -> None:
    plain = make_checkpoint("llama", tmp_path / "plain", num_hidden_layers=1)
    with changed_tensors(plain) as tensors:
        tensors[f"{DOWN}_scale"] = torch.ones(64, 1)
    with pytest.raises(ConfigError, match=f"1 tensors of quantised weights were not used, '{DOWN}_scale' first"):
        greedy_tokens(plain, backend="transformers")


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_text_part_of_a_vision_model_may_be_in_fp8(backend: str, tmp_path: Path) -> None:
    """As Ministral 3 is published."""
    make_seeing("ministral3 in mistral3", tmp_path / "plain")
    stored = store_in_fp8(tmp_path / "plain", "tensors", tmp_path / "stored")
    whole: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "plain")
    tokens, card = greedy_tokens(stored, backend=backend)
    assert tokens == [greedy_choices(whole, *each) for each in zip(make_requests(), tokens, strict=True)]
    assert card.backend.startswith(backend)


def test_names_are_the_file_s_for_modules_and_plain_for_kernels(tmp_path: Path) -> None:
    make_seeing("ministral3 in mistral3", tmp_path / "plain")
    stored = store_in_fp8(tmp_path / "plain", "tensors", tmp_path / "stored")
    for_modules, for_kernels = open_for_modules(stored), open_tensors(stored)
    assert for_modules is not None
    with changed_tensors(tmp_path / "plain") as tensors:
        assert set(for_modules) == set(tensors)
    assert torch.equal(for_modules[f"language_model.{DOWN}"], for_kernels[DOWN])


def test_unsupported_quantisation_is_reported_by_the_kernels(tmp_path: Path) -> None:
    stored, _ = make_fp8_pair("llama", "blocks", tmp_path, num_hidden_layers=1)
    change_config(stored, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    with pytest.raises(Unsupported, match="quantised by modelopt NVFP4"):
        load(stored)
    change_config(stored, quantization_config="fp8")
    with pytest.raises(ConfigError, match=r"quantization_config in .* is damaged: it is 'fp8'"):
        open_tensors(stored)
