from __future__ import annotations

import pytest

from tests.workers.execute.factories import (
    advance,
    chunks_of,
    expected_output,
    make_beams,
    make_engine,
    make_scheduler,
    make_sequence,
    recover,
)
from triptych.workers.execute.scheduling.audit import check
from triptych.workers.execute.scheduling.deadlines import Deadlines
from triptych.workers.execute.scheduling.sequence import Sequence

LATE = 1000


def due(*, deadline_at: int = 0, queue_deadline_at: int = 0) -> Sequence:
    sequence = make_sequence(0, num_tokens=12, max_tokens=40)
    sequence.deadline_at, sequence.queue_deadline_at = deadline_at, queue_deadline_at
    return sequence


@pytest.mark.parametrize(("now_ns", "expires"), [(LATE - 1, False), (LATE, True), (LATE + 1, True)])
def test_sequence_ends_at_its_deadline(now_ns: int, expires: bool) -> None:
    scheduler = make_scheduler(due(deadline_at=LATE))
    assert bool(scheduler.expire(now_ns)) == expires
    assert bool(scheduler.live) != expires


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5], ids=["waiting", "prefilling", "ready", "decoding"])
def test_deadline_ends_a_sequence_in_any_state_and_frees_its_pages(num_steps: int) -> None:
    scheduler = make_scheduler(due(deadline_at=LATE))
    for _ in range(num_steps):
        advance(scheduler)
    num_tokens = scheduler.live[0, 0].num_output_tokens
    assert scheduler.expire(LATE) == [((0, 0), f"deadline exceeded after {num_tokens} tokens")]
    check(scheduler)
    scheduler.release((0, 0))
    assert scheduler.cache.pool.num_free == scheduler.cache.num_pages


def test_next_plan_reports_expired_sequences_even_if_none_is_left() -> None:
    scheduler = make_scheduler(due(deadline_at=LATE))
    scheduler.expire(LATE)
    plan = scheduler.plan()
    assert plan is not None
    assert [key for key, _ in plan.expired] == [(0, 0)]
    assert set(scheduler.apply(plan, []).expired) == {(0, 0)}
    assert scheduler.plan() is None


def test_sequence_started_in_time_may_outlast_the_queue_limit() -> None:
    scheduler = make_scheduler(due(queue_deadline_at=LATE))
    advance(scheduler)
    assert scheduler.expire(LATE) == []


def test_sequence_not_started_in_time_never_starts() -> None:
    scheduler = make_scheduler(due(queue_deadline_at=LATE))
    assert scheduler.expire(LATE) == [((0, 0), "deadline exceeded before the request was scheduled")]


def test_recovered_sequence_counts_as_started() -> None:
    scheduler = make_scheduler(recover(due(queue_deadline_at=LATE), 2))
    assert scheduler.expire(LATE) == []


def test_beams_count_as_started_with_the_first_of_their_search() -> None:
    """The others have no pages before the prompt is computed."""
    beams = make_beams(0, 3, num_tokens=20)
    for beam in beams:
        beam.queue_deadline_at = LATE
    scheduler = make_scheduler(*beams)
    advance(scheduler)
    assert scheduler.expire(LATE) == []


def test_preempted_sequence_counts_as_started() -> None:
    late = make_sequence(1, num_tokens=4, max_tokens=30)
    late.queue_deadline_at = LATE
    scheduler = make_scheduler(make_sequence(0, num_tokens=4, max_tokens=30), late, num_pages=8)
    while not late.num_preemptions:
        advance(scheduler)
    assert scheduler.expire(LATE) == []


def test_sequence_ended_before_its_deadline_does_not_expire() -> None:
    scheduler = make_scheduler(due(deadline_at=LATE))
    scheduler.release((0, 0))
    assert scheduler.expire(LATE) == []


def test_other_sequences_continue() -> None:
    scheduler = make_scheduler(due(deadline_at=LATE), make_sequence(1))
    scheduler.expire(LATE)
    plan = advance(scheduler)
    assert chunks_of(plan) == {1: 5}


def test_engine_reads_its_clock_once_per_step() -> None:
    times = iter(range(0, 10_000, 10))
    sequence = due(deadline_at=120)
    engine = make_engine(sequence, clock=lambda: next(times))
    outputs: list[int] = []
    while (step := engine.step()) is not None:
        outputs += step.progress.token_ids
        expired = step.progress.expired
    assert list(expired) == [sequence.key]
    assert outputs == expected_output(sequence)[: len(outputs)]
    assert outputs


def test_deadlines_of_ended_sequences_are_forgotten() -> None:
    deadlines = Deadlines()
    for _ in range(100):
        deadlines.add(due(deadline_at=LATE))
    deadlines.tidy({})
    assert len(deadlines) == 0
