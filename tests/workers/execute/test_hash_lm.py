from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest

from tests.workers.execute.factories import VOCAB_SIZE, make_sequence
from triptych.workers.execute.hash_lm import HashRunner, expected_tokens
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import StepInputs, StepResult


def prompt_step(sequence: Sequence) -> StepInputs:
    """The whole prompt of ``sequence`` in pages 1, 2, ... of four tokens."""
    positions = np.arange(sequence.num_tokens, dtype=np.int32)
    return StepInputs(
        token_ids=sequence.tokens[: sequence.num_tokens],
        positions=positions,
        slot_mapping=positions.astype(np.int64) + 4,
        query_starts=np.array([0, sequence.num_tokens], np.int32),
        context_lens=np.array([sequence.num_tokens], np.int32),
        block_tables=np.array([[1, 2, 3]], np.int32),
        num_decodes=0,
        sample_rows=positions[-1:],
        sampled=[sequence],
    )


def compute(inputs: StepInputs, *, step_ms: float = 0.0) -> StepResult:
    runner = HashRunner(VOCAB_SIZE, num_pages=8, page_size=4, step_ms=step_ms)
    runner.launch(inputs)
    return runner.collect()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 12])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_those_of_the_definition(num_tokens: int, temperature: float) -> None:
    sequence = make_sequence(3, num_tokens=num_tokens, temperature=temperature)
    prompt = sequence.tokens[:num_tokens]
    expected = expected_tokens(prompt, 1, VOCAB_SIZE, temperature=temperature, seed=3)
    assert compute(prompt_step(sequence)).token_ids.tolist() == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_tables": np.array([[2, 1, 3]], np.int32)},
        {"block_tables": np.array([[1, 0, 3]], np.int32)},
        {"context_lens": np.array([8], np.int32)},
        {"positions": np.arange(1, 10, dtype=np.int32)},
        {"slot_mapping": np.arange(5, 14)},
    ],
    ids=["swapped pages", "trash page", "short context", "positions", "slots"],
)
def test_any_wrong_input_changes_the_tokens(wrong: dict[str, Any]) -> None:
    inputs = prompt_step(make_sequence(num_tokens=9))
    assert compute(dataclasses.replace(inputs, **wrong)).token_ids != compute(inputs).token_ids


def test_seed_and_position_change_sampled_tokens() -> None:
    texts = {tuple(expected_tokens([1, 2], 8, VOCAB_SIZE, temperature=1.0, seed=seed)) for seed in range(20)}
    assert len(texts) == 20


def test_steps_are_collected_in_the_order_of_their_launch() -> None:
    runner = HashRunner(VOCAB_SIZE, num_pages=8, page_size=4)
    sequences = [make_sequence(index) for index in range(2)]
    for sequence in sequences:
        runner.launch(prompt_step(sequence))
    expected = [expected_tokens(sequence.tokens[:5], 1, VOCAB_SIZE) for sequence in sequences]
    assert [runner.collect().token_ids.tolist() for _ in sequences] == expected


def test_logprobs_are_returned_on_request() -> None:
    result = compute(prompt_step(make_sequence(logprobs=3)))
    assert len(result.logprobs[0].token_ids) == 3
    assert result.logprobs[0].token_ids[0] == result.token_ids[0]
    assert not compute(prompt_step(make_sequence())).logprobs


def test_step_takes_the_configured_time() -> None:
    begin = time.perf_counter()
    compute(prompt_step(make_sequence()), step_ms=20)
    assert time.perf_counter() - begin >= 0.02
