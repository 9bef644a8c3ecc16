"""Sequences that are swapped out and in, and prefixes that outlive their page on the device."""

from __future__ import annotations

import io
from typing import Any

import pytest

from tests.workers.execute.factories import (
    advance,
    advance_until,
    chunks_of,
    expected_output,
    make_engine,
    make_scheduler,
    make_sequence,
    make_sequences,
    run,
)
from triptych.workers.execute.scheduling.audit import check, take_stats
from triptych.workers.execute.scheduling.moves import Moves, MovesDraft
from triptych.workers.execute.scheduling.plan import Draft, Plan
from triptych.workers.execute.scheduling.prefix import NO_MATCH
from triptych.workers.execute.scheduling.scheduler import Scheduler
from triptych.workers.execute.scheduling.sequence import SequenceState


def crowded(**options: Any) -> Scheduler:
    """Two sequences that outgrow eleven pages."""
    options = {"host_pages": 12, "preemption": "swap", **options}
    return make_scheduler(*make_sequences(2, num_tokens=8, max_tokens=30), num_pages=11, prefill_chunk=64, **options)


def swapped(**options: Any) -> tuple[Scheduler, Plan]:
    """``crowded`` just after sequence 1 was swapped out, and the step in which it was."""
    scheduler = crowded(**options)
    plan = advance_until(scheduler, lambda plan: plan.preempted)
    check(scheduler)
    return scheduler, plan


def test_swapped_sequence_keeps_its_computed_tokens() -> None:
    scheduler, plan = swapped()
    second = scheduler.live[1, 0]
    assert second.state is SequenceState.SWAPPED
    assert second.num_computed_tokens == second.num_tokens - 1
    assert [host for _, host in plan.moves.swap_out] == second.host_table
    assert len(second.host_table) == scheduler.cache.pages_for(second.num_computed_tokens)


def test_swapped_sequence_recomputes_only_its_last_token() -> None:
    scheduler, _ = swapped()
    second = scheduler.live[1, 0]
    host_table = list(second.host_table)
    scheduler.release((0, 0))
    plan = advance(scheduler)
    assert chunks_of(plan) == {1: 1}
    assert plan.moves.swap_in == tuple(zip(second.block_table, host_table, strict=False))[: len(host_table)]
    assert take_stats(scheduler).num_free_host_pages == 12


def test_swapped_sequence_also_wants_the_page_for_which_it_was_swapped_out() -> None:
    scheduler, _ = swapped()
    second = scheduler.live[1, 0]
    wanted = scheduler.cache.num_wanted([second], NO_MATCH)
    assert wanted == scheduler.cache.pages_for(second.num_tokens) == len(second.host_table) + 1


@pytest.mark.parametrize(
    ("options", "is_swapped"),
    [
        ({"preemption": "swap"}, True),
        ({"preemption": "recompute"}, False),
        ({"preemption": "auto", "prefill_chunk": 64}, False),
        ({"preemption": "auto", "prefill_chunk": 4, "max_num_batched_tokens": 64}, True),
        ({"preemption": "swap", "host_pages": 2}, False),
        ({"preemption": "swap", "host_pages": 0}, False),
    ],
    ids=["swap", "recompute", "auto, short", "auto, long", "the host is full", "no host pages"],
)
def test_choice_between_swapping_and_recomputing(options: dict[str, Any], is_swapped: bool) -> None:
    options = {"host_pages": 12, "prefill_chunk": 64, **options}
    scheduler = make_scheduler(*make_sequences(2, num_tokens=8, max_tokens=30), num_pages=11, **options)
    advance_until(scheduler, lambda plan: plan.preempted)
    assert (scheduler.roster.num_swaps, scheduler.roster.num_preemptions) == (int(is_swapped), 1)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_texts_do_not_depend_on_swapping(page_size: int, prefix_cache: bool) -> None:
    sequences = make_sequences(6, num_tokens=6, max_tokens=18)
    expected = {sequence.key: expected_output(sequence) for sequence in sequences}
    options: dict[str, Any] = {"preemption": "swap", "prefix_cache": prefix_cache, "host_pages": 60}
    engine = make_engine(*sequences, page_size=page_size, num_pages=32 // page_size, **options)
    assert run(engine) == expected
    assert engine.stats.num_swaps > 0


def test_no_new_sequence_is_admitted_while_one_is_swapped_out() -> None:
    scheduler, _ = swapped()
    scheduler.add(make_sequence(2, num_tokens=1))
    plan = advance_until(scheduler, lambda plan: plan.starts)
    assert plan.started[0] == (1, 0)


def test_aborted_swapped_sequence_frees_its_host_pages() -> None:
    scheduler, _ = swapped()
    scheduler.release((1, 0))
    assert take_stats(scheduler).num_free_host_pages == 12
    assert take_stats(scheduler).num_swapped == 0
    check(scheduler)


def test_pages_shared_before_a_swap_are_shared_again() -> None:
    pair = [make_sequence(index, speaker=0, num_tokens=12, max_tokens=30) for index in range(2)]
    options: dict[str, Any] = {"prefix_cache": True, "host_pages": 20, "preemption": "swap", "prefill_chunk": 64}
    scheduler = make_scheduler(*pair, num_pages=12, **options)
    for sequence in pair:
        sequence.tokens[11] += sequence.arrival
    advance_until(scheduler, lambda plan: plan.preempted)
    assert pair[1].state is SequenceState.SWAPPED
    scheduler.add(make_sequence(2, speaker=0, num_tokens=12, max_tokens=2))
    advance_until(scheduler, lambda plan: (1, 0) in plan.started)
    check(scheduler)


# Prefixes


def remembered(**options: Any) -> Scheduler:
    """A prompt of speaker 0 was served, and evicted from six pages by another one."""
    options = {"num_pages": 6, "host_pages": 8, **options}
    scheduler = make_scheduler(prefix_cache=True, prefill_chunk=64, **options)
    for index, speaker in enumerate((0, 7)):
        scheduler.add(make_sequence(index, speaker=speaker, num_tokens=17, max_tokens=1))
        advance(scheduler)
        scheduler.release((index, 0))
    return scheduler


def test_evicted_prefix_is_found_on_the_host() -> None:
    scheduler = remembered()
    assert take_stats(scheduler).num_idle_host_pages > 0
    again = make_sequence(2, speaker=0, num_tokens=17)
    scheduler.add(again)
    plan = advance(scheduler)
    assert again.num_cached_tokens == 16
    assert len(plan.moves.swap_in) + len(plan.moves.copies) == 3
    check(scheduler)


def test_without_host_pages_an_evicted_prefix_is_lost() -> None:
    scheduler = remembered(host_pages=0)
    again = make_sequence(2, speaker=0, num_tokens=17)
    scheduler.add(again)
    advance(scheduler)
    assert again.num_cached_tokens == 4


def test_swapped_sequences_take_the_host_pages_of_prefixes() -> None:
    scheduler = crowded(host_pages=6, prefix_cache=True)
    advance_until(scheduler, lambda plan: plan.moves.swap_in)
    assert scheduler.roster.num_swaps == 1
    check(scheduler)


def test_prefix_on_the_host_waits_at_most_a_step_even_if_every_step_evicts() -> None:
    scheduler = remembered(num_pages=24, host_pages=60, page_size=1)
    scheduler.add(make_sequence(3, num_tokens=1, max_tokens=34))
    assert all(advance(scheduler).moves.swap_out for _ in range(3))
    scheduler.add(make_sequence(4, speaker=0, num_tokens=17))
    first, second = advance(scheduler), advance(scheduler)
    assert (bool(first.moves.swap_out), first.starts) == (True, ())
    assert (second.moves.swap_out, second.started) == ((), [(4, 0)])
    assert second.starts[0].num_cached_tokens == 16


def test_sequence_started_in_the_step_that_preempts_it_is_not_swapped_out() -> None:
    """The pages it would swap out are only about to be copied."""
    scheduler = remembered(num_pages=20, preemption="swap")
    sequence, draft = make_sequence(2, speaker=0, num_tokens=16), Draft(3, 64)
    scheduler.add(sequence)
    match = scheduler._admission.may_start(sequence)
    assert match is not None
    scheduler.roster.start(sequence, match, draft)
    scheduler.roster.preempt(sequence, draft)
    assert (sequence.state, sequence.num_computed_tokens) == (SequenceState.WAITING, 0)
    check(scheduler)


def test_recomputed_page_no_longer_needs_its_host_page() -> None:
    scheduler = remembered()
    assert take_stats(scheduler).num_idle_host_pages == 3
    scheduler.add(make_sequence(2, speaker=0, num_tokens=16))
    plan = advance(scheduler)
    assert len(plan.moves.swap_in) == 3  # two shared, one copied to be overwritten
    assert take_stats(scheduler).num_idle_host_pages == 0
    check(scheduler)


def test_copy_of_a_page_in_transit_reads_from_that_page_s_source() -> None:
    moves = MovesDraft(swap_in={5: 2})
    moves.copy(5, 7)
    moves.copy(4, 8)
    assert moves.finish() == Moves(copies=((4, 8),), swap_in=((5, 2), (7, 2)))


def test_reallocated_page_gets_no_copy_meant_for_its_last_holder() -> None:
    scheduler = remembered()
    cache, first, second = scheduler.cache, make_sequence(2, speaker=0, num_tokens=17), make_sequence(3, num_tokens=24)
    cache.enter([first], cache.find(first))
    cache.give_up(first)
    assert cache.extend(second, 24) == 24
    assert cache.take_moves().swap_in == ()


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_texts_do_not_depend_on_prefixes_from_the_host(page_size: int) -> None:
    trace = io.StringIO()
    engine = make_engine(
        prefix_cache=True, host_pages=40, page_size=page_size, num_pages=28 // page_size, trace_file=trace
    )
    for index, speaker in enumerate((0, 3, 5, 0, 3, 5)):
        sequence = make_sequence(index, speaker=speaker, num_tokens=17 + index, max_tokens=4)
        expected = expected_output(sequence)
        engine.add(sequence)
        assert run(engine)[sequence.key] == expected
        engine.release(sequence.key)
    assert '"swap_in"' in trace.getvalue()
