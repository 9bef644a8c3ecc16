"""gpt-oss, whose experts are one tensor per layer: plain numbers, or the four bits in which it is published."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.execute.kernels.levels import WHOLE_LEVELS
from tests.workers.execute.model.checkpoint.test_four_bits import load
from tests.workers.execute.model.native.decoders import (
    PLAINLY,
    NativeEngine,
    change_config,
    changed_tensors,
    in_mxfp4,
    make_checkpoint,
    make_request,
    make_small_decoder,
    pack,
)
from tests.workers.execute.model.native.logits import NUM_TOKENS, random_tokens
from tests.workers.execute.model.native.test_experts import TOLERANCES, Floats, read_spec, run_chunks
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.checkpoint.stored_weights import open_tensors
from triptych.workers.execute.model.modules.experts import FollowedChoices
from triptych.workers.execute.model.native.decoder import NativeDecoder
from triptych.workers.execute.model.spec.decoder import Unsupported

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "initializer_range": 0.1,
}  # groups of 32, not all of which are halves of 64
KINDS = ("gate", "up", "down")
STACK = "model.layers.1.mlp.experts.gate_up_proj"

Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and the same experts as plain numbers."""
    checkpoint = make_checkpoint("gpt_oss", tmp_path / "published", **SIZES)
    return in_mxfp4(checkpoint, tmp_path / "plain"), tmp_path / "plain"


def decoder_of(checkpoint: Path, level: str, format_: Format = Format.MXFP4, num_threads: int = 2) -> NativeDecoder:
    return make_small_decoder(checkpoint, level, format_, num_threads)


def test_each_expert_gets_its_part_of_the_stack(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("gpt_oss", tmp_path, **SIZES)
    stored, found = dict(AutoModelForCausalLM.from_pretrained(checkpoint).named_parameters()), open_tensors(checkpoint)
    assert {name: tuple(found[name].shape) for name in found} == found.shapes() == read_spec(checkpoint).tensors()
    assert len(found) == len(found.shapes())
    for expert in range(5):
        name = f"model.layers.1.mlp.experts.{expert}"
        assert torch.equal(found[f"{name}.gate_proj.weight"], stored[STACK][expert, :, ::2].T)
        assert torch.equal(found[f"{name}.up_proj.weight"], stored[STACK][expert, :, 1::2].T)
        assert torch.equal(found[f"{name}.up_proj.bias"], stored[f"{STACK}_bias"][expert, 1::2])
        assert torch.equal(found[f"{name}.down_proj.weight"], stored["model.layers.1.mlp.experts.down_proj"][expert].T)


def test_four_bits_are_kept_unchanged(pair: tuple[Path, Path]) -> None:
    """No weight is rounded again: the kernels multiply by the same values as transformers."""
    published, plain = map(open_tensors, pair)
    assert published.quantised_format is Format.MXFP4
    assert published.shapes() == plain.shapes()
    weights = pack(pair[0], available_levels()[0], Format.MXFP4).quantised()
    experts = {name: unpack for name, unpack in weights.items() if published.has_four_bits(name)}
    assert len(experts) == 3 * 5 * 3  # matrices, experts, layers
    assert all(torch.equal(unpack(), plain[name]) for name, unpack in experts.items())


@pytest.mark.parametrize("level", WHOLE_LEVELS)
def test_logits_equal_transformers_in_float64(level: str, pair: tuple[Path, Path]) -> None:
    published, plain = pair
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64, **PLAINLY)
    token_ids, spec = random_tokens(), read_spec(published)
    logits, choices = run_chunks(decoder_of(published, level), token_ids, [100, 1, 40, 9], spec)
    followed = FollowedChoices(torch.from_numpy(choices))
    with torch.inference_mode(), followed.by(model, spec):
        exact = model(torch.from_numpy(token_ids)[None].long(), use_cache=False).logits[0].numpy()
    assert max(np.abs(logits - exact).max() / np.abs(exact).max(), followed.difference) < TOLERANCES[Format.INT8]


@pytest.mark.parametrize("level", WHOLE_LEVELS)
def test_logits_have_the_same_bits_in_any_chunks(level: str, pair: tuple[Path, Path]) -> None:
    token_ids = random_tokens()
    alone, _ = run_chunks(decoder_of(pair[0], level, num_threads=1), token_ids, [NUM_TOKENS])
    for sizes in ([1] * NUM_TOKENS, [7] * 21 + [3], [64, 64, 22]):
        assert np.array_equal(run_chunks(decoder_of(pair[0], level), token_ids, sizes)[0], alone), sizes


def test_published_format_is_served(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Answers of the first start, which compares it with transformers, and of the next one, which uses the proof."""
    published, _ = pair
    outputs = []
    for _ in range(2):
        engine = NativeEngine(published, tmp_path, dtype="auto", num_pages=32)
        assert engine.card.backend == f"native mxfp4 on {available_levels()[0]}"
        outputs.append(engine.run(*(make_request(index, 20 + index, 12) for index in range(3)), num_pages=32))
    assert outputs[0] == outputs[1]


def test_eight_bit_pages_work_with_attention_sinks(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("gpt_oss", tmp_path / "checkpoint", head_dim=32)
    engine = NativeEngine(checkpoint, tmp_path, kv_dtype="int8", dtype="float32")
    assert engine.card.backend == f"native float32, int8 keys and values on {available_levels()[0]}"


def test_sinks_take_weight(tmp_path: Path) -> None:
    """The greater they are, the less weight is left to the tokens; the smallest have no effect."""
    checkpoint, token_ids = make_checkpoint("gpt_oss", tmp_path), random_tokens(40)

    def logits(sink: float) -> Floats:
        with changed_tensors(checkpoint) as tensors:
            for name in tensors:
                if name.endswith("sinks"):
                    tensors[name] = torch.full_like(tensors[name], sink)
        return run_chunks(decoder_of(checkpoint, available_levels()[0], Format.FLOAT32), token_ids, [40])[0]

    least, less, usual = logits(-math.inf), logits(-100.0), logits(1.0)
    assert np.array_equal(least, less)
    assert np.abs(usual - less).max() > 1e-2 * np.abs(less).max()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_other_formats_are_refused(quantization: str, pair: tuple[Path, Path]) -> None:
    with pytest.raises(Unsupported, match=f"have four bits already, and quantization is {quantization}"):
        load(pair[0], quantization)


def test_mxfp4_in_another_family_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path)
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(Unsupported, match="its weights are quantised by mxfp4"):
        load(folder)


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def change(name: str, to: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def apply(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = to(tensors[name]).contiguous()

    return apply


@pytest.mark.parametrize(("damage", "text"), [
    (drop(f"{STACK}_scales"), r"shape \(5, 320, 3, 16\), its scales None; a group has 16 bytes and a scale"),
    (change(f"{STACK}_scales", lambda scales: scales[:, :, :2]), r"its scales \(5, 320, 2\)"),
    (change(f"{STACK}_blocks", lambda numbers: numbers[..., :8]), r"shape \(5, 320, 3, 8\)"),
    (change(f"{STACK}_blocks", lambda numbers: numbers.flatten(2)), r"shape \(5, 320, 48\), which should have 4 axes"),
    (change(f"{STACK}_scales", lambda scales: scales.int()), "gate_up_proj_scales in .* is not of type uint8"),
    (change(f"{STACK}_bias", lambda biases: biases[0]), r"gate_up_proj_bias in .* should have 2 axes"),
])  # fmt: skip
def test_damaged_stack_is_named(damage: Change, text: str, pair: tuple[Path, Path]) -> None:
    with changed_tensors(pair[0]) as tensors:
        damage(tensors)
    with pytest.raises(ConfigError, match=text):
        load(pair[0])


def test_missing_expert_is_reported(pair: tuple[Path, Path]) -> None:
    with changed_tensors(pair[0]) as tensors:
        for name in (f"{STACK}_blocks", f"{STACK}_scales", f"{STACK}_bias"):
            tensors[name] = tensors[name][:4].contiguous()
    with pytest.raises(Unsupported, match=r"from its config, model.layers.1.mlp.experts.4.gate_proj.bias first"):
        load(pair[0])


def test_experts_may_be_stacked_by_their_outputs(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3_5_moe_text", tmp_path)
    plain = {name: tensor.clone() for name, tensor in open_tensors(checkpoint).items()}
    with changed_tensors(checkpoint) as tensors:
        for layer in range(4):
            module = f"model.layers.{layer}.mlp.experts"
            experts = [[tensors.pop(f"{module}.{n}.{kind}_proj.weight") for kind in KINDS] for n in range(6)]
            tensors[f"{module}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
            tensors[f"{module}.down_proj"] = torch.stack([down for _, _, down in experts])
    stacked = open_tensors(checkpoint)
    assert stacked.shapes() == {name: tuple(tensor.shape) for name, tensor in plain.items()}
    assert all(torch.equal(stacked[name], tensor) for name, tensor in plain.items())
