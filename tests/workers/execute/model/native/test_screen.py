"""Greedy steps compute few logits exactly, and choose the tokens that all logits would."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from tests.workers.execute.kernels.levels import FASTEST, WHOLE_LEVELS
from tests.workers.execute.model.native.decoders import (
    FEW_PAGES,
    NativeEngine,
    changed_tensors,
    greedy_choices,
    make_checkpoint,
    make_inputs,
    make_request,
    make_small_decoder,
)
from tests.workers.execute.model.native.logits import random_tokens
from triptych.protocol.arrays import Float32, Int32
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.checkpoint.stored_weights import open_tensors
from triptych.workers.execute.model.native import sizes
from triptych.workers.execute.model.native.decoder import NativeDecoder, NativeOutputs
from triptych.workers.execute.model.native.sizes import has_screen
from triptych.workers.execute.model.spec.describe import describe_decoder
from triptych.workers.execute.step import StepInputs

VOCAB_SIZE = 1000  # the last block has columns without a token
FORMATS = (Format.FLOAT32, Format.BFLOAT16)
MOST_ROWS = 4  # kMostRows in src/screen.h
HEAD = "lm_head.weight"


@pytest.fixture(autouse=True)
def fixture_small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even these are screened."""
    monkeypatch.setattr(sizes, "SCREENED_WEIGHTS", 0)


over_formats = pytest.mark.parametrize("format_", FORMATS, ids=lambda format_: format_.name.lower())


def checkpoint_with(folder: Path, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Path:
    """``change`` returns another head, or changes it in place."""
    checkpoint = make_checkpoint("llama", folder, tie_word_embeddings=False, vocab_size=VOCAB_SIZE)
    with changed_tensors(checkpoint) as tensors:
        changed = change(tensors[HEAD])
        tensors[HEAD] = tensors[HEAD] if changed is None else changed.contiguous()
    return checkpoint


def step_of(num_rows: int, seed: int = 0) -> StepInputs:
    """A step with as many sequences, of which the last token is sampled."""
    inputs = make_inputs([(random_tokens(20, seed + row), 0, 20) for row in range(num_rows)], num_pages=FEW_PAGES)
    return replace(inputs, sample_rows=np.arange(19, 20 * num_rows, 20, dtype=np.int32))


def run_both(decoder: NativeDecoder, inputs: StepInputs) -> tuple[NativeOutputs, NativeOutputs]:
    """With all logits, and with only the greatest."""
    exact = deepcopy(decoder.run(inputs))
    decoder.submit(inputs, only_greatest=True)
    return exact, decoder.wait()


def assert_same_choice(decoder: NativeDecoder, inputs: StepInputs) -> tuple[Float32, Float32]:
    """Returns the logits of both."""
    exact, found = run_both(decoder, inputs)
    assert np.array_equal(found.tokens, exact.tokens)
    assert np.array_equal(found.greatest, exact.greatest)
    assert np.array_equal(exact.tokens, exact.logits.argmax(1)), "not the first of the greatest"
    assert (found.logits >= exact.logits).all()  # equal, or the most that it may be
    return exact.logits, found.logits


def share_of_exact(exact: Float32, found: Float32) -> float:
    return float(np.mean(exact == found))


@over_formats
@pytest.mark.parametrize("level", WHOLE_LEVELS)
@pytest.mark.parametrize("hidden_size", [64, 100])  # the latter is padded
def test_few_logits_are_computed(level: str, format_: Format, hidden_size: int, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path, vocab_size=VOCAB_SIZE, hidden_size=hidden_size)
    decoder = make_small_decoder(checkpoint, level, format_)
    for num_rows in range(1, MOST_ROWS + 1):
        for seed in range(0, 50, 10):
            assert share_of_exact(*assert_same_choice(decoder, step_of(num_rows, seed))) < 0.4


def test_more_rows_have_all_logits(tmp_path: Path) -> None:
    decoder = make_small_decoder(make_checkpoint("llama", tmp_path, vocab_size=VOCAB_SIZE), FASTEST, Format.BFLOAT16)
    assert share_of_exact(*assert_same_choice(decoder, step_of(MOST_ROWS + 1))) == 1


@over_formats
@pytest.mark.parametrize("num_threads", [1, 2])
def test_first_of_equal_tokens_is_chosen(format_: Format, num_threads: int, tmp_path: Path) -> None:
    half = VOCAB_SIZE // 2
    checkpoint = checkpoint_with(tmp_path, lambda head: torch.cat([head[:half]] * 2))
    decoder = make_small_decoder(checkpoint, FASTEST, format_, num_threads)
    for seed in range(8):
        exact, _ = assert_same_choice(decoder, step_of(2, seed))
        assert (exact.argmax(1) < half).all()


@over_formats
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_tokens_may_be_equal(format_: Format, value: float, tmp_path: Path) -> None:
    decoder = make_small_decoder(checkpoint_with(tmp_path, lambda head: torch.full_like(head, value)), FASTEST, format_)
    assert share_of_exact(*assert_same_choice(decoder, step_of(3))) == 1


@over_formats
def test_columns_without_tokens_are_not_chosen(format_: Format, tmp_path: Path) -> None:
    """Their logits are 0, and all others are less."""
    decoder = make_small_decoder(checkpoint_with(tmp_path, lambda head: None), FASTEST, format_)
    inputs = step_of(1)
    hidden = decoder.run(replace(inputs, embedded_rows=inputs.sample_rows)).hidden[0].copy()

    def opposite(head: torch.Tensor) -> torch.Tensor:
        return head * 0.01 - torch.from_numpy(hidden)

    decoder = make_small_decoder(checkpoint_with(tmp_path / "opposite", opposite), FASTEST, format_)
    exact, _ = assert_same_choice(decoder, inputs)
    assert (exact < 0).all()


@over_formats
def test_close_tokens_are_told_apart(format_: Format, tmp_path: Path) -> None:
    """Weights that are equal in eight bits, and differ in their last digits; a few are large."""

    def close(head: torch.Tensor) -> torch.Tensor:
        nearly = head[:1] * (1 + 2.0**-7 * torch.randint(-1, 2, head.shape))
        nearly[:, 3] *= 50
        nearly[::7] *= 0.3
        return nearly

    decoder = make_small_decoder(checkpoint_with(tmp_path, close), FASTEST, format_)
    for seed in range(8):
        assert_same_choice(decoder, step_of(2, seed))


@over_formats
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_token_whose_weights_are_not_finite_is_reported(format_: Format, value: float, tmp_path: Path) -> None:
    def spoil(head: torch.Tensor) -> None:
        head[700, 5] = value

    decoder = make_small_decoder(checkpoint_with(tmp_path, spoil), FASTEST, format_)
    for seed in range(4):
        exact, found = run_both(decoder, step_of(2, seed))
        assert np.array_equal(np.isfinite(found.greatest), np.isfinite(exact.greatest))


@over_formats
def test_state_that_is_not_finite_is_reported(format_: Format, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path, vocab_size=VOCAB_SIZE)
    with changed_tensors(checkpoint) as tensors:
        tensors["model.embed_tokens.weight"][5, 0] = np.nan
    decoder = make_small_decoder(checkpoint, FASTEST, format_)
    bad: Int32 = np.full(20, 5, np.int32)
    inputs = replace(make_inputs([(bad, 0, 20)], num_pages=FEW_PAGES), sample_rows=np.array([19], np.int32))
    assert np.isnan(run_both(decoder, inputs)[1].greatest).all()


@pytest.mark.parametrize("num_guesses", [None, 3])
def test_engine_generates_what_transformers_does(num_guesses: int | None, tmp_path: Path) -> None:
    """With guesses, a step has several rows of a sequence; with five sequences, too many."""
    checkpoint = make_checkpoint("llama", tmp_path / "checkpoint", vocab_size=VOCAB_SIZE)
    engine = NativeEngine(checkpoint, tmp_path, dtype="float32", num_speculative_tokens=num_guesses)
    for count in (1, 3, 5):
        requests = [make_request(number, 10 + number, 12) for number in range(count)]
        outputs = engine.run(*requests)
        assert outputs == [greedy_choices(engine.model, *each) for each in zip(requests, outputs, strict=True)]


def test_only_a_large_plain_head_is_screened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def is_screened(family: str, format_: Format = Format.BFLOAT16, vocab_size: int = VOCAB_SIZE) -> bool:
        checkpoint = make_checkpoint(family, tmp_path / f"{family} {vocab_size}", vocab_size=vocab_size)
        shapes = open_tensors(checkpoint).shapes()
        return has_screen(describe_decoder(AutoConfig.from_pretrained(checkpoint), shapes), format_)

    assert is_screened("llama")
    assert not is_screened("llama", vocab_size=100)
    assert not is_screened("llama", Format.INT8)
    assert not is_screened("gemma2")  # it caps logits
    monkeypatch.undo()
    assert not is_screened("llama")  # it stays in a cache
