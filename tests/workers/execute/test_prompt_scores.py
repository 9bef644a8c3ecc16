"""Logprobs of prompts in the engine: every token once and right, however its prompt is cut, shared or interrupted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.workers.execute.factories import (
    VOCAB_SIZE,
    expected_output,
    make_engine,
    make_group,
    make_sequence,
    make_sequences,
    recover,
)
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.hash_lm import HashRunner, logprob_of, state_of
from triptych.workers.execute.scheduling.plan import MAX_SCORED_TOKENS
from triptych.workers.execute.scheduling.sequence import Key, Sequence
from triptych.workers.execute.step import PromptScores, StepInputs


def run(engine: Engine) -> tuple[dict[Key, list[PromptScores]], dict[Key, list[int]]]:
    """Scores and tokens of every sequence, in order of arrival, with the invariants checked."""
    scores: dict[Key, list[PromptScores]] = {}
    tokens: dict[Key, list[int]] = {}
    while engine.has_work:
        outputs = engine.step()
        assert outputs is not None
        engine.check()
        for key, found in outputs.scores.items():
            scores.setdefault(key, []).append(found)
        for key, token_id in outputs.progress.by_key().items():
            tokens.setdefault(key, []).append(token_id)
    return scores, tokens


def assert_scored(sequence: Sequence, found: list[PromptScores]) -> None:
    """Every token of the prompt but the first has one logprob, and it is that of the definition."""
    prompt = sequence.tokens[: sequence.num_prompt_tokens].tolist()
    positions = [part.start + i for part in found for i in range(len(part.columns.logprobs))]
    assert positions == list(range(len(prompt) - 1)), "a token was left out, or scored twice"
    expected = [logprob_of(state_of(prompt[:i]), prompt[i], VOCAB_SIZE) for i in range(1, len(prompt))]
    np.testing.assert_allclose(np.concatenate([part.columns.logprobs for part in found]), expected, rtol=1e-6)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_every_chunk_is_scored_in_any_batch(chunk: int, depth: int) -> None:
    scored = [make_sequence(i, num_tokens=n, prompt_logprobs=i) for i, n in enumerate((60, 2, 31))]
    mates = [make_sequence(i, num_tokens=20, max_tokens=30) for i in (3, 4)]
    scores, tokens = run(make_engine(*scored, *mates, prefill_chunk=chunk, depth=depth))
    for sequence in scored:
        assert_scored(sequence, scores[sequence.key])
        assert tokens[sequence.key] == expected_output(sequence)
    assert scores.keys() == {sequence.key for sequence in scored}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_tokens", [1, 2, 30])
def test_prompt_is_scored_without_an_answer(num_tokens: int, depth: int) -> None:
    sequence = make_sequence(num_tokens=num_tokens, max_tokens=0, prompt_logprobs=1)
    scores, tokens = run(make_engine(sequence, depth=depth))
    if num_tokens > 1:
        assert_scored(sequence, scores.pop(sequence.key))
    assert (scores, tokens, sequence.finish_reason) == ({}, {}, "length")


@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_prompt_is_not_scored_again(preemption: str, chunk: int, prefix_cache: bool) -> None:
    sequences = make_sequences(6, num_tokens=20, max_tokens=20, prompt_logprobs=1)
    host_pages = 20 * (preemption == "swap")
    options: dict[str, Any] = {"preemption": preemption, "host_pages": host_pages, "prefix_cache": prefix_cache}
    engine = make_engine(*sequences, num_pages=22, prefill_chunk=chunk, **options)
    scores, tokens = run(engine)
    assert engine.stats.num_preemptions > 0
    for sequence in sequences:
        assert_scored(sequence, scores[sequence.key])
        assert tokens[sequence.key] == expected_output(sequence)


def test_cached_prompt_is_computed_again() -> None:
    first, second = (make_sequence(i, speaker=0, num_tokens=40, prompt_logprobs=1) for i in range(2))
    third = make_sequence(2, speaker=0, num_tokens=40)
    engine = make_engine(first, prefix_cache=True)
    scores, _ = run(engine)
    for sequence in (second, third):
        engine.add(sequence)
        scores |= run(engine)[0]
    assert_scored(first, scores[first.key])
    assert_scored(second, scores[second.key])
    assert (second.num_cached_tokens, third.num_cached_tokens) == (0, 39)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_other_samples_of_a_group_fork_from_the_scored_one(prefix_cache: bool) -> None:
    group = make_group(0, 3, num_tokens=30)
    group[0].params = make_sequence(prompt_logprobs=2, temperature=1.0).params
    engine = make_engine(*group, prefix_cache=prefix_cache)
    scores, tokens = run(engine)
    assert_scored(group[0], scores[group[0].key])
    assert [tokens[s.key] for s in group] == [expected_output(s) for s in group]


def test_answer_recovered_after_a_crash_is_not_scored_again() -> None:
    sequence = recover(make_sequence(num_tokens=30, prompt_logprobs=1), 3)
    sequence.num_scored_tokens = 30  # as the journal reports it for a sequence with a token
    assert run(make_engine(sequence))[0] == {}


def test_number_of_scored_rows_in_a_step_is_limited() -> None:
    class Counting(HashRunner):
        most = 0

        def launch(self, inputs: StepInputs) -> None:
            Counting.most = max(Counting.most, len(inputs.score_rows))
            super().launch(inputs)

    sequences = make_sequences(3, num_tokens=300, max_tokens=1, prompt_logprobs=0)
    sizes: dict[str, Any] = {"num_pages": 1000, "prefill_chunk": 1800}
    scores, _ = run(make_engine(*sequences, runner=Counting, **sizes))
    for sequence in sequences:
        assert_scored(sequence, scores[sequence.key])
    assert 0 < Counting.most <= MAX_SCORED_TOKENS


def test_other_sequences_of_a_step_that_raises_are_scored() -> None:
    class Broken(HashRunner):
        def launch(self, inputs: StepInputs) -> None:
            if any(span.sequence.key == (1, 0) for span in inputs.scored):
                raise RuntimeError("no")
            super().launch(inputs)

    sequences = make_sequences(3, num_tokens=30, prompt_logprobs=1)
    scores, _ = run(make_engine(*sequences, runner=Broken))
    assert sequences[1].finish_reason == "error"
    for sequence in (sequences[0], sequences[2]):
        assert_scored(sequence, scores[sequence.key])


def test_prompt_with_nan_logits_fails_alone() -> None:
    class NotANumber(HashRunner):
        def collect(self) -> Any:
            result = super().collect()
            for scores in result.scores:
                if scores.key == (1, 0):
                    scores.columns.logprobs[-1] = np.nan
            return result

    sequences = make_sequences(2, num_tokens=30, prompt_logprobs=1)
    scores, _ = run(make_engine(*sequences, runner=NotANumber))
    assert [sequence.finish_reason for sequence in sequences] == ["length", "error"]
    assert_scored(sequences[0], scores[(0, 0)])
