from __future__ import annotations

import itertools

import pytest

from tests.workers.execute.factories import (
    VOCAB_SIZE,
    expected_output,
    make_engine,
    make_scheduler,
    make_sequence,
    make_sequences,
    recover,
    run,
    step_tokens,
    tokens_of,
)
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.hash_lm import HashRunner


def test_step_reports_tokens_with_their_index() -> None:
    sequence = make_sequence(num_tokens=3, max_tokens=2)
    engine = make_engine(sequence)
    steps = [engine.step(), engine.step()]
    rows = [row for step in steps if step is not None for row in tokens_of(step.progress)]
    assert rows == [((0, 0), index, token) for index, token in enumerate(expected_output(sequence))]


def test_no_stop_token_ends_a_sequence_before_min_tokens() -> None:
    sequence = make_sequence(max_tokens=9, min_tokens=5, stop_ids=frozenset(range(VOCAB_SIZE)))
    assert len(run(make_engine(sequence))[sequence.key]) == 5


def test_step_reports_started_and_preempted_sequences() -> None:
    engine = make_engine(*make_sequences(2, num_tokens=2, max_tokens=12), num_pages=8, page_size=2)
    plans = [step.plan for _ in range(100) if (step := engine.step()) is not None]
    started = [key for plan in plans for key in plan.started]
    preempted = [key for plan in plans for key in plan.preempted]
    assert started == [(0, 0), (1, 0), (1, 0)]
    assert preempted == [(1, 0)]


def test_step_is_timed_by_the_given_clock() -> None:
    scheduler = make_scheduler(make_sequence())
    runner = HashRunner(VOCAB_SIZE, num_pages=64, page_size=4)
    engine = Engine(scheduler, runner, clock=itertools.count(100).__next__)
    step = engine.step()
    assert step is not None
    assert (step.began_at, step.collected_at) == (101, 102)


def test_logprobs_are_returned_for_the_sequence_that_requested_them() -> None:
    step = make_engine(make_sequence(0), make_sequence(1, logprobs=2)).step()
    assert step is not None
    assert list(step.logprobs) == [(1, 0)]


def test_aborted_sequence_gives_no_more_tokens() -> None:
    engine = make_engine(*make_sequences(3))
    engine.step()
    engine.release((1, 0))
    assert set(step_tokens(engine)) == {(0, 0), (2, 0)}


@pytest.mark.parametrize("num_emitted", [1, 7, 19])
def test_recovered_sequence_continues_exactly_where_it_was(num_emitted: int) -> None:
    sequence = recover(make_sequence(num_tokens=10, max_tokens=20), num_emitted)
    engine = make_engine(sequence, make_sequence(1))
    assert run(engine)[sequence.key] == expected_output(sequence)


def test_two_steps_cannot_be_in_flight() -> None:
    engine = make_engine(make_sequence())
    plan = engine.plan()
    assert plan is not None
    engine.launch(plan)
    with pytest.raises(AssertionError, match="in flight"):
        engine.plan()
