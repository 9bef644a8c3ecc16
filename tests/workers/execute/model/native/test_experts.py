"""Experts on the compiled kernels: they match their definition, and have the same bits in any batch."""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.workers.execute.model.native.decoders import (
    EVERY_STEP,
    FEW_PAGES,
    PLAIN_FORMATS,
    PLAINLY,
    changed_tensors,
    in_four_bits,
    levels_and_formats,
    make_checkpoint,
    make_decoder,
    make_inputs,
    make_small_decoder,
    over_levels,
)
from tests.workers.execute.model.native.families import FAMILIES
from tests.workers.execute.model.native.logits import (
    NUM_TOKENS,
    assert_same_bits_in_every_step,
    exact_logits,
    random_tokens,
)
from triptych.protocol.arrays import Int32
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.checkpoint.stored_weights import open_tensors
from triptych.workers.execute.model.modules.experts import ExpertStack, FollowedChoices
from triptych.workers.execute.model.native.decoder import NativeDecoder
from triptych.workers.execute.model.spec.decoder import DecoderSpec
from triptych.workers.execute.model.spec.describe import describe_decoder

Floats = npt.NDArray[np.float32]

NUM_PAGES = FEW_PAGES
# Relative to the greatest logit, and to the routers' logits.
TOLERANCES = {Format.FLOAT32: 2e-5, Format.BFLOAT16: 0.06, Format.INT8: 0.2, Format.INT4: 0.2}
MANY = {"num_experts": 70, "num_experts_per_tok": 8, "moe_intermediate_size": 33, "norm_topk_prob": True}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "odd sizes": ("qwen3_moe", FAMILIES["qwen3_moe"] | {"hidden_size": 100, "moe_intermediate_size": 70}),
    "more experts than a vector has lanes": ("qwen3_moe", MANY),
    "every other layer": (
        "qwen3_moe",
        FAMILIES["qwen3_moe"] | {"mlp_only_layers": [], "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "all experts for all": ("qwen3_moe", FAMILIES["qwen3_moe"] | {"num_experts_per_tok": 6}),
    "one expert": ("qwen3_moe", FAMILIES["qwen3_moe"] | {"num_experts": 1, "num_experts_per_tok": 1}),
    "two of four, window": ("mixtral", {"sliding_window": 70, "hidden_size": 132, "intermediate_size": 65}),
    "whole queries": ("olmoe", FAMILIES["olmoe"] | {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 1}),
    "sinks, biases, limits": ("gpt_oss", FAMILIES["gpt_oss"] | {"hidden_size": 100, "intermediate_size": 70}),
    "sigmoids, biases, a shared expert": (
        "glm4_moe",
        FAMILIES["glm4_moe"] | {"hidden_size": 100, "moe_intermediate_size": 33, "num_experts_per_tok": 3},
    ),
    "biases, two shared experts": ("ernie4_5_moe", FAMILIES["ernie4_5_moe"] | {"hidden_size": 100}),
    "sigmoids that are not normed": ("dots1", FAMILIES["dots1"]),
    "two best of groups": ("deepseek_v3", FAMILIES["deepseek_v3"] | {"num_experts_per_tok": 3}),
    "best of groups": ("deepseek_v2", FAMILIES["deepseek_v2"] | {"num_experts_per_tok": 3}),
    "one of eight": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 1, "head_dim": 32}),
}


def read_spec(checkpoint: Path) -> DecoderSpec:
    return describe_decoder(AutoConfig.from_pretrained(checkpoint), open_tensors(checkpoint).shapes())


def run_chunks(
    decoder: NativeDecoder, token_ids: Int32, sizes: list[int], spec: DecoderSpec | None = None
) -> tuple[Floats, Int32]:
    """Logits [tokens, V] of one sequence in chunks, and with a ``spec`` the experts chosen by its tokens."""
    shape = (0, 0) if spec is None else (spec.num_layers, spec.experts_per_token)
    choices, pieces, start = np.zeros((len(token_ids), *shape), np.int32), [], 0
    for size in sizes:
        own = None if spec is None else choices[start : start + size]
        inputs = make_inputs([(token_ids, start, size)], num_pages=NUM_PAGES)
        pieces.append(decoder.run(inputs, choices=own).logits.copy())
        start += size
    return np.concatenate(pieces), choices


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers_in_float64(shape: str, tmp_path: Path) -> None:
    """With the same choices: which of two almost equal experts is chosen depends on rounding."""
    family, overrides = SHAPES[shape]
    checkpoint = in_four_bits(make_checkpoint(family, tmp_path, **{"initializer_range": 0.1, **overrides}))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, **PLAINLY)
    token_ids, spec = random_tokens(), read_spec(checkpoint)
    for level, format_ in levels_and_formats(list(SHAPES).index(shape)):
        decoder = make_small_decoder(checkpoint, level, format_)
        logits, choices = run_chunks(decoder, token_ids, [100, 1, 40, 9], spec)
        followed = FollowedChoices(torch.from_numpy(choices))
        with torch.inference_mode(), followed.by(model, spec):
            exact = model(torch.from_numpy(token_ids)[None].long(), use_cache=False).logits[0].numpy()
        difference = np.abs(logits - exact).max() / np.abs(exact).max()
        assert max(difference, followed.difference) < TOLERANCES[format_], f"{level} {format_.name}"


def test_choices_equal_transformers_in_float32(tmp_path: Path) -> None:
    checkpoint, token_ids = make_checkpoint("mixtral", tmp_path), random_tokens()
    exact = exact_logits(checkpoint, token_ids)
    logits, _ = run_chunks(
        make_small_decoder(checkpoint, available_levels()[0], Format.FLOAT32), token_ids, [NUM_TOKENS]
    )
    assert np.abs(logits - exact).max() < TOLERANCES[Format.FLOAT32] * np.abs(exact).max()


@over_levels(
    "shape", ["odd sizes", "more experts than a vector has lanes", "sinks, biases, limits", "two best of groups"]
)
def test_logits_have_the_same_bits_in_any_chunks_and_batches(
    shape: str, level: str, format_: Format, tmp_path: Path
) -> None:
    family, overrides = SHAPES[shape]
    assert_same_bits_in_every_step(make_checkpoint(family, tmp_path, **overrides), level, format_)


@pytest.mark.parametrize("format_", PLAIN_FORMATS, ids=lambda f: f.name.lower())
def test_all_rows_may_choose_the_same_experts(format_: Format, tmp_path: Path) -> None:
    """With a router that scores all experts equally, the first ones are chosen, and an MLP of each would be equal."""
    checkpoint, token_ids = make_checkpoint("mixtral", tmp_path), random_tokens()
    with changed_tensors(checkpoint) as tensors:
        for name in tensors:
            if name.endswith("gate.weight"):
                tensors[name] = torch.zeros_like(tensors[name])
    spec = read_spec(checkpoint)
    decoder = make_small_decoder(checkpoint, available_levels()[0], format_)
    alone, choices = run_chunks(decoder, token_ids, [NUM_TOKENS], spec)
    assert np.array_equal(choices, np.broadcast_to(np.array([0, 1], np.int32), choices.shape))
    assert np.array_equal(run_chunks(decoder, token_ids, [1] * NUM_TOKENS)[0], alone)


@over_levels("value", [math.inf, math.nan])
def test_nan_row_affects_no_other(value: float, level: str, format_: Format, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3_moe", tmp_path, hidden_size=100, moe_intermediate_size=70)
    with changed_tensors(checkpoint) as tensors:
        tensors["model.embed_tokens.weight"][5, 0] = value
    decoder, bad = make_small_decoder(checkpoint, level, format_), (np.full(20, 5, np.int32), 0, 20)
    mates = [(random_tokens(30, seed), 0, 30) for seed in (1, 2)]
    expected = [decoder.run(make_inputs([mate], num_pages=NUM_PAGES)).logits.copy() for mate in mates]
    outputs = decoder.run(make_inputs([mates[0], bad, mates[1]], num_pages=NUM_PAGES))
    assert np.isnan(outputs.greatest[30:50]).all()
    assert np.array_equal(outputs.logits[:30], expected[0])
    assert np.array_equal(outputs.logits[50:], expected[1])
    assert np.array_equal(decoder.run(make_inputs([mates[0]], num_pages=NUM_PAGES)).logits, expected[0])


def test_choices_that_are_not_the_likeliest_are_detected(tmp_path: Path) -> None:
    checkpoint, token_ids = make_checkpoint("mixtral", tmp_path), random_tokens(40)
    model, spec = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), read_spec(checkpoint)
    decoder = make_small_decoder(checkpoint, available_levels()[0], Format.FLOAT32)
    _, right = run_chunks(decoder, token_ids, [40], spec)
    twice, others = right[..., :1].repeat(2, axis=-1), (right + 1) % spec.num_experts
    for choices, is_right in ((right, True), (right[..., ::-1].copy(), True), (twice, False), (others, False)):
        followed = FollowedChoices(torch.from_numpy(choices))
        with torch.inference_mode(), followed.by(model, spec):
            model(torch.from_numpy(token_ids)[None].long(), use_cache=False)
        assert (followed.difference < 1e-5) == is_right, followed.difference


def test_only_requested_parts_of_a_stack_are_read() -> None:
    read: list[str] = []

    def note(name: str) -> torch.Tensor:
        read.append(name)
        return torch.full((1, 2), float(name[-1]))

    stack = ExpertStack(note, [("gate 0", "up 1"), ("gate 2", "up 3")], torch.cat)
    assert stack[torch.tensor(1)].tolist() == [[2.0, 2.0], [3.0, 3.0]]
    assert read == ["gate 2", "up 3"]


def test_steps_computed_in_the_background_give_the_same_logits(tmp_path: Path) -> None:
    checkpoint, token_ids = make_checkpoint("qwen3_moe", tmp_path), random_tokens()
    level, sizes = available_levels()[0], [40, 1, 1, 50, 1, 57]
    alone, _ = run_chunks(make_small_decoder(checkpoint, level, Format.BFLOAT16, num_threads=1), token_ids, sizes)
    options: dict[str, Any] = {"num_pages": NUM_PAGES, "thresholds": EVERY_STEP, "overlaps": True, "num_threads": 4}
    decoder = make_decoder(checkpoint, level, Format.BFLOAT16, **options)
    steps = [
        make_inputs([(token_ids, start, size)], num_pages=NUM_PAGES)
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
    ]
    pieces = []
    decoder.submit(steps[0])
    for step in steps[1:]:
        decoder.submit(step)
        pieces.append(decoder.wait().logits.copy())
    pieces.append(decoder.wait().logits.copy())
    assert np.array_equal(np.concatenate(pieces), alone)
