"""Proposed and verified tokens: the answer stays the same, in fewer steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.workers.execute.clients import Clients
from tests.workers.execute.factories import (
    Propose,
    Told,
    advance,
    expected_output,
    make_engine,
    make_scheduler,
    make_sequence,
    make_sequences,
)
from triptych.protocol.config import ModelConfig, PipelineConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.scheduling.plan import Chunk
from triptych.workers.execute.scheduling.prompt_lookup import look_up
from triptych.workers.execute.scheduling.proposals import MAX_CHECKED_TOKENS, TOKEN_COST, FindCosts
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import StepResult


def sequence_with(tokens: list[int]) -> Sequence:
    sequence = make_sequence(num_tokens=len(tokens), max_tokens=50)
    sequence.tokens[: len(tokens)] = tokens
    return sequence


def truth(sequence: Sequence, max_tokens: int) -> list[int]:
    """The hash model's next token."""
    count = sequence.num_output_tokens
    return expected_output(sequence)[count : count + max_tokens]


def wrong(sequence: Sequence, max_tokens: int) -> list[int]:
    return [token % 96 + 1 for token in truth(sequence, max_tokens)]


def run(*sequences: Sequence, propose: Propose = truth, **options: Any) -> tuple[Engine, dict[Any, list[int]], int]:
    """The engine, the tokens of every sequence, and the number of steps."""
    engine = make_engine(*sequences, propose=propose, **{"num_speculative_tokens": 4, "page_size": 64, **options})
    answers: dict[Any, list[int]] = {sequence.key: [] for sequence in sequences}
    num_steps = 0
    while (step := engine.step()) is not None:
        num_steps += 1
        for key, index, token in zip(
            step.progress.keys, step.progress.token_indices, step.progress.token_ids, strict=True
        ):
            assert index == len(answers[key])
            answers[key].append(token)
    return engine, answers, num_steps


@pytest.mark.parametrize(
    ("tokens", "following"),
    [
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9]),
        ([5, 6, 1, 9, 5, 6, 2, 9, 5, 6], [2, 9, 5]),  # the latest place
        ([4, 5, 6, 1, 9, 5, 6, 2, 4, 5, 6], [1, 9, 5]),  # the longest match, although another one is later
        ([3, 1, 2, 1, 2], [1, 2, 1]),  # a repetition continues
        ([7, 7, 7], [7, 7, 7]),
        ([5, 6, 7, 8, 6], []),  # a single token is not enough
        ([5, 6, 7], []),
        ([5], []),
    ],
)
def test_tokens_after_an_earlier_match_are_proposed(tokens: list[int], following: list[int]) -> None:
    assert look_up(sequence_with(tokens), 3) == following


def test_matches_are_searched_only_in_existing_tokens() -> None:
    """The array beyond the last token is not filled yet."""
    sequence = sequence_with([5, 6, 9, 5, 6])
    sequence.num_tokens = 2
    assert look_up(sequence, 3) == []


def test_right_proposals_save_steps() -> None:
    engine, answers, num_steps = run(make_sequence(max_tokens=21))
    assert answers == {(0, 0): expected_output(make_sequence(max_tokens=21))}
    assert num_steps == 1 + 4  # the prompt's, and five tokens in each later one
    assert (engine.stats.num_proposed_tokens, engine.stats.num_accepted_tokens) == (16, 16)
    assert engine.history.summary().mean_batch_tokens == 5


def test_wrong_proposals_change_nothing_and_become_rare() -> None:
    engine, answers, num_steps = run(make_sequence(max_tokens=60), propose=wrong)
    assert answers == {(0, 0): expected_output(make_sequence(max_tokens=60))}
    assert num_steps == 60
    assert engine.stats.num_accepted_tokens == 0
    assert engine.stats.num_proposed_tokens < 60


@pytest.mark.parametrize(("cost", "num_steps"), [(0.0, 76), (0.4, 101), (1.0, 300), (3.0, 300)])
def test_expensive_proposals_are_made_less_often(cost: float, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are right; a proposal that takes as long as a step is useless."""
    monkeypatch.setattr(Told, "costs", (FindCosts(token=cost),))
    _, answers, taken = run(make_sequence(max_tokens=300), num_pages=200)
    assert answers == {(0, 0): expected_output(make_sequence(max_tokens=300))}
    assert taken <= num_steps
    assert (taken == 300) == (cost >= 1.0)


def test_tokens_up_to_the_first_wrong_one_are_accepted() -> None:
    def nearly(sequence: Sequence, max_tokens: int) -> list[int]:
        return [*truth(sequence, 2), *wrong(sequence, max_tokens)[2:]]

    scheduler = make_scheduler(make_sequence(max_tokens=20), propose=nearly, num_speculative_tokens=4, page_size=64)
    sequence = scheduler.live[0, 0]
    answers = expected_output(make_sequence(max_tokens=20))
    advance(scheduler, token_id=answers[0])
    plan = scheduler.plan()
    assert plan is not None
    assert plan.chunks == (Chunk((0, 0), 5, 5, True, (*answers[1:3], *plan.chunks[0].proposed[2:])),)
    progress = scheduler.apply(plan, [answers[1], answers[2], answers[3], 1, 1])
    assert (progress.token_ids, progress.token_indices) == (answers[1:4], [1, 2, 3])
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (9, 8)


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_proposals_continue_into_the_next_pages(page_size: int) -> None:
    _, answers, num_steps = run(make_sequence(max_tokens=31), page_size=page_size)
    assert answers == {(0, 0): expected_output(make_sequence(max_tokens=31))}
    assert num_steps == 1 + 6


@pytest.mark.parametrize("propose", [truth, wrong])
@pytest.mark.parametrize("num_pages", [13, 21, 60])
def test_no_sequence_is_preempted_for_proposals(num_pages: int, propose: Propose) -> None:
    """They use free pages, and free those in which all of them were wrong."""
    sequences = make_sequences(3, num_tokens=3, max_tokens=10)
    sizes: dict[str, Any] = {"page_size": 2, "num_pages": num_pages, "num_speculative_tokens": 15}
    engine = make_engine(*sequences, propose=propose, prefix_cache=True, **sizes)
    while (step := engine.step()) is not None:
        engine.check()
        assert num_pages == 13 or not step.plan.preempted
    assert [s.output_tokens.tolist() for s in sequences] == [expected_output(s) for s in sequences]
    assert engine.stats.num_proposed_tokens > 0


def test_stop_token_among_the_proposals_ends_the_answer() -> None:
    answers = expected_output(make_sequence(max_tokens=30))
    stop = next(token for index, token in enumerate(answers) if index > 3 and token not in answers[:index])
    stops = make_sequence(max_tokens=30, stop_ids=frozenset({stop}))
    _, outputs, _ = run(stops)
    assert outputs == {(0, 0): answers[: answers.index(stop) + 1]}
    assert stops.finish_reason == "stop"


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7])
def test_nothing_is_proposed_beyond_the_last_token(limit: int) -> None:
    _, answers, _ = run(make_sequence(max_tokens=limit))
    assert answers == {(0, 0): expected_output(make_sequence(max_tokens=limit))}
    _, answers, _ = run(make_sequence(num_tokens=5, max_tokens=30), max_model_len=5 + limit)
    assert answers == {(0, 0): expected_output(make_sequence(max_tokens=30))[:limit]}


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.5}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"logprobs": 2}],
)
def test_sequence_that_needs_every_token_at_once_gets_no_proposals(params: dict[str, Any]) -> None:
    engine, _, num_steps = run(make_sequence(max_tokens=10, **params))
    assert (num_steps, engine.stats.num_proposed_tokens) == (10, 0)


def test_many_decodes_get_no_proposals_and_few_share_a_step() -> None:
    for count in range(1, MAX_CHECKED_TOKENS + 1):
        sequences = make_sequences(count, num_tokens=1, max_tokens=12)
        sizes: dict[str, Any] = {"max_num_seqs": 16, "num_pages": 64, "prefill_chunk": 16}
        sizes["num_speculative_tokens"] = 15
        engine = make_engine(*sequences, propose=truth, page_size=64, **sizes)
        engine.step()
        plan = engine.plan()
        assert plan is not None
        assert plan.has_proposals == (count < 1 / TOKEN_COST / 2)
        assert plan.num_tokens <= MAX_CHECKED_TOKENS
        engine.launch(plan)
        engine.collect()


def test_decode_beside_a_prompt_gets_proposals_too() -> None:
    engine = make_engine(make_sequence(max_tokens=20), propose=truth, num_speculative_tokens=4, page_size=64)
    engine.step()
    engine.add(make_sequence(1, num_tokens=20, prompt_logprobs=1))
    outputs = engine.step()
    assert outputs is not None
    assert [chunk.num_tokens for chunk in outputs.plan.chunks] == [4, 8]  # the prompt's first, from a budget of 12
    assert outputs.progress.token_ids == expected_output(make_sequence(max_tokens=20))[1:5]
    assert len(outputs.scores) == 1


@pytest.mark.parametrize("num_speculative_tokens", [0, 4])
def test_with_proposals_no_step_of_few_is_planned_ahead(num_speculative_tokens: int) -> None:
    engine = make_engine(make_sequence(max_tokens=20), depth=1, num_speculative_tokens=num_speculative_tokens)
    for _ in range(3):
        engine.step()
    assert engine.num_in_flight == (0 if num_speculative_tokens else 1)


def test_no_step_is_planned_after_proposals_of_a_few_among_many() -> None:
    """If the budget lets only some sequences decode, these may have proposals."""
    sizes: dict[str, Any] = {"page_size": 64, "max_num_seqs": 14, "prefill_chunk": 64, "max_kv_reads": 18}
    clients = Clients(**sizes, depth=1, num_speculative_tokens=8)
    for index in range(14):
        clients.add(make_sequence(index, num_tokens=2, max_tokens=20))
    clients.close()
    assert clients.engine.stats.num_accepted_tokens > 0


class Failing(HashRunner):
    """Fails the named rows of proposals."""

    def _sample(self, *arguments: Any) -> StepResult:
        result = super()._sample(*arguments)
        failed = dict.fromkeys(range(2, len(result.token_ids)), "not a number")
        return StepResult(np.where(np.arange(len(result.token_ids)) < 2, result.token_ids, 0), failed=failed)


def test_proposal_that_fails_the_model_fails_no_sequence() -> None:
    """It may be a token that would never be sampled. If it is sampled, the step that computes it alone fails."""
    _, answers, num_steps = run(make_sequence(max_tokens=21), runner=Failing)
    assert answers == {(0, 0): expected_output(make_sequence(max_tokens=21))}
    assert num_steps == 1 + 10


class Spoiling(HashRunner):
    """A proposal makes the row of the token before it NaN: this can happen although it is masked."""

    def _sample(self, inputs: Any, *arguments: Any) -> StepResult:
        result = super()._sample(inputs, *arguments)
        if inputs.positions[0] == 0 or len(inputs.token_ids) == len(inputs.query_starts) - 1:
            return result
        return StepResult(np.zeros_like(result.token_ids), failed={0: "not a number"})


class Raising(HashRunner):
    """Cannot compute one sequence, nor any batch that contains it."""

    def launch(self, inputs: Any) -> None:
        if any(sequence.key == (1, 0) and sequence.num_output_tokens > 2 for sequence in inputs.sampled):
            raise ValueError("bad luck")
        super().launch(inputs)


def test_step_with_proposals_is_halved_like_any_other() -> None:
    sequences = make_sequences(3, max_tokens=21)
    _, answers, _ = run(*sequences, runner=Raising)
    for sequence in sequences:
        expected = expected_output(make_sequence(sequence.key[0], max_tokens=21))
        assert answers[sequence.key] == expected[: 5 if sequence.key == (1, 0) else 21]
    assert [s.finish_reason for s in sequences] == ["length", "error", "length"]


class OneByOne(HashRunner):
    """Cannot compute more than one token after the prompt."""

    def launch(self, inputs: Any) -> None:
        if inputs.positions[0] and len(inputs.token_ids) > 1:
            raise ValueError("too much")
        super().launch(inputs)


@pytest.mark.parametrize("runner", [Spoiling, OneByOne])
def test_proposals_that_spoil_a_step_fail_no_sequence(runner: type[HashRunner]) -> None:
    engine, answers, num_steps = run(make_sequence(max_tokens=6), runner=runner)
    assert answers == {(0, 0): expected_output(make_sequence(max_tokens=6))}
    assert num_steps == 6
    assert engine.stats.num_proposed_tokens


def test_prefixes_completed_by_proposals_are_found_by_others() -> None:
    first = make_sequence(num_tokens=4, max_tokens=13)
    engine, answers, _ = run(first, page_size=4, prefix_cache=True, num_speculative_tokens=3)
    second = make_sequence(1, num_tokens=17, max_tokens=4)
    second.tokens[:17] = first.tokens[:17]
    engine.add(second)
    while engine.step() is not None:
        pass
    assert second.num_cached_tokens == 16
    assert second.output_tokens.tolist() == expected_output(second)
    assert len(answers[first.key]) == 13


def test_random_schedules_give_the_same_tokens() -> None:
    """One token in five is proposed wrongly; the clients know their expected answers."""
    num_accepted = 0
    for seed in range(60):
        rng = random.Random(seed)
        clients = Clients(
            page_size=rng.choice([2, 4, 16]),
            num_pages=rng.randint(8, 24),
            max_num_seqs=rng.randint(1, 5),
            prefix_cache=rng.random() < 0.5,
            host_pages=rng.choice([0, 20]),
            depth=rng.choice([0, 1]),
            num_speculative_tokens=rng.choice([2, 5, 15]),
        )
        for _ in range(10):
            if clients.room:
                options: dict[str, Any] = {"num_tokens": rng.randint(1, 20), "max_tokens": rng.randint(1, 25)}
                clients.add(make_sequence(len(clients.expected), **options, temperature=rng.choice([0.0, 1.0])))
            for _ in range(rng.randint(0, 5)):
                clients.step()
            if clients.live and rng.random() < 0.2:
                clients.abort(rng.randint(0, 100))
        clients.close()
        num_accepted += clients.engine.stats.num_accepted_tokens
    assert num_accepted > 500


def test_speculation_is_refused_with_a_trace() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is 4, and with trace it must be 0"):
        SchedulerConfig(num_speculative_tokens=4, trace="steps.jsonl")
    with pytest.raises(ConfigError, match="draft_model is '/small', and with trace there is none"):
        PipelineConfig(model=ModelConfig(draft_model="/small"), scheduler=SchedulerConfig(trace="steps.jsonl"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"draft_model": "/small", "num_speculative_tokens": 0}, "the limits are 1 and 15"),
        ({"draft_model": ""}, "draft_model is empty"),
        ({"draft_model": "/small", "model": "hash-lm"}, "hash-lm has no weights to guess with"),
        ({"draft_model": "hash-lm"}, "hash-lm has no weights to guess with"),
    ],
)
def test_draft_model_that_cannot_propose_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PipelineConfig.from_options(**options)
