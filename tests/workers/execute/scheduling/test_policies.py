"""What each policy promises, shown by the steps it plans."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from tests.workers.execute.factories import advance, chunks_of, make_scheduler, make_sequence, make_sequences
from triptych.protocol.config import POLICIES
from triptych.workers.execute.scheduling.plan import Plan
from triptych.workers.execute.scheduling.scheduler import Scheduler


def decoding(num_decodes: int = 2, **options: Any) -> Scheduler:
    """That many decoding sequences, with pages for many more."""
    decodes = [make_sequence(index, num_tokens=1, max_tokens=60) for index in range(num_decodes)]
    scheduler = make_scheduler(*decodes, num_pages=256, **options)
    while len(scheduler.rows) < num_decodes:
        advance(scheduler)
    return scheduler


def gaps(plans: list[Plan], index: int) -> list[int]:
    """Numbers of steps between those that contain sequence ``index``."""
    steps = [plan.step for plan in plans if index in chunks_of(plan)]
    return [later - earlier for earlier, later in pairwise(steps)]


# prefill_first


def test_prefill_first_finishes_started_prompts_before_decodes() -> None:
    scheduler = decoding(policy="prefill_first", max_num_batched_tokens=8)
    scheduler.add(make_sequence(5, num_tokens=30))
    steps = [chunks_of(advance(scheduler)) for _ in range(5)]
    assert steps[0] == {0: 1, 1: 1, 5: 6}  # it waited, and decoding sequences come before waiting ones
    assert steps[1:4] == [{5: 8}, {5: 8}, {5: 8}]
    assert set(steps[4]) == {0, 1, 5}


@pytest.mark.parametrize("max_decode_skip", [1, 3, 8])
def test_prefill_first_skips_decodes_only_a_limited_number_of_times(max_decode_skip: int) -> None:
    scheduler = decoding(policy="prefill_first", max_num_batched_tokens=8, max_decode_skip=max_decode_skip)
    for index in (4, 5):
        scheduler.add(make_sequence(index, num_tokens=200))
    plans = [advance(scheduler) for _ in range(40)]
    assert max(gaps(plans, 0)) == max_decode_skip + 1


def test_prefill_first_keeps_no_margin_and_fifo_a_fifth() -> None:
    margins = [make_scheduler(policy=name, safety_margin=None).policy.margin for name in ("prefill_first", "fifo")]
    assert margins == [0.0, 0.2]


# round_robin


@pytest.mark.parametrize("num_active", [5, 6])
def test_round_robin_serves_every_sequence_once_in_two_steps(num_active: int) -> None:
    sequences = [make_sequence(index, num_tokens=2, max_tokens=40) for index in range(num_active)]
    scheduler = make_scheduler(*sequences, policy="round_robin", max_num_seqs=4, prefill_chunk=16)
    advance(scheduler)
    plans = [advance(scheduler) for _ in range(24)]
    assert max(max(gaps(plans, index)) for index in range(num_active)) == 2
    shares = Counter(key for plan in plans for key in plan.sampled)
    assert max(shares.values()) - min(shares.values()) <= 1


def test_fifo_keeps_sequences_in_their_rows() -> None:
    sequences = [make_sequence(index, num_tokens=2, max_tokens=40) for index in range(6)]
    scheduler = make_scheduler(*sequences, prefill_chunk=16)
    advance(scheduler)
    assert {key[0] for _ in range(8) for key in advance(scheduler).sampled} == {0, 1, 2, 3}


# priority


def with_priorities(*priorities: int, **options: Any) -> Scheduler:
    sequences = [make_sequence(index, num_tokens=4) for index in range(len(priorities))]
    for sequence, priority in zip(sequences, priorities, strict=True):
        sequence.priority = priority
    return make_scheduler(*sequences, policy="priority", max_num_batched_tokens=4, **options)


def test_lowest_priority_number_goes_first_and_equal_ones_by_arrival() -> None:
    scheduler = with_priorities(0, -1, 5, -1)
    assert [sequence.arrival for sequence in scheduler.waiting] == [1, 3, 0, 2]


def test_number_of_later_arrivals_that_outweigh_a_level_of_priority() -> None:
    scheduler = with_priorities(1, 0, 0, 0, 0, priority_ageing=2)
    assert [sequence.arrival for sequence in scheduler.waiting] == [1, 0, 2, 3, 4]


def test_lowest_priority_is_preempted_first() -> None:
    policy = make_scheduler(policy="priority").policy
    sequences = make_sequences(3)
    sequences[1].priority = 3
    assert policy.victim(sequences) is sequences[1]


# decode_join_fill


def test_decodes_wait_for_prompts_until_the_rows_are_nearly_full() -> None:
    scheduler = decoding(num_decodes=3, decode_join_fill=0.8, max_num_batched_tokens=8)
    scheduler.add(make_sequence(7, num_tokens=12))
    assert [set(chunks_of(advance(scheduler))) for _ in range(3)] == [{7}, {7}, {0, 1, 2, 7}]
    scheduler.add(make_sequence(8, num_tokens=12))
    assert set(chunks_of(advance(scheduler))) == {0, 1, 2, 7, 8}


def test_decodes_that_wait_for_prompts_are_skipped_a_limited_number_of_times() -> None:
    scheduler = decoding(num_decodes=1, decode_join_fill=0.95, max_num_batched_tokens=8, max_decode_skip=4)
    scheduler.add(make_sequence(7, num_tokens=300))
    assert max(gaps([advance(scheduler) for _ in range(30)], 0)) == 5


# Budgets


def test_no_step_reads_more_context_than_max_kv_reads_except_for_its_first_sequence() -> None:
    scheduler = decoding(num_decodes=4, max_kv_reads=40, max_prefill_skip=2)
    scheduler.add(make_sequence(8, num_tokens=90))
    plans = [advance(scheduler) for _ in range(80)]
    assert all(plan.num_reads <= 40 or len(plan.chunks) == 1 for plan in plans)
    assert any(plan.num_reads > 40 for plan in plans)
    assert (8, 0) in {key for plan in plans for key in plan.sampled}


def test_sequence_beyond_the_read_budget_is_skipped_and_comes_first_next_time() -> None:
    sequences = [make_sequence(index, num_tokens=size, max_tokens=60) for index, size in enumerate((20, 20, 3))]
    scheduler = make_scheduler(*sequences, max_kv_reads=60, prefill_chunk=64, num_pages=256)
    advance(scheduler)
    object.__setattr__(scheduler.config, "max_kv_reads", 30)
    turns = [set(chunks_of(advance(scheduler))) for _ in range(4)]
    assert turns == [{0, 2}, {1, 2}, {0, 2}, {1, 2}]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_skips_a_sequence_for_long(policy: str) -> None:
    scheduler = decoding(num_decodes=3, policy=policy, max_num_batched_tokens=6, max_kv_reads=200)
    for index in (4, 5):
        scheduler.add(make_sequence(index, num_tokens=90))
    plans = [advance(scheduler) for _ in range(60)]
    assert all(max(gaps(plans, index)) <= 9 for index in range(3))
    assert gaps(plans, 4)
    assert max(gaps(plans, 4)) <= 9


# skip_ahead


def held_back(**options: Any) -> Scheduler:
    """Sequence 0 decodes, 1 does not fit, and 2, 3, 4 would fit."""
    sizes = (20, 32, 2, 2, 2)
    sequences = [make_sequence(index, num_tokens=size, max_tokens=12) for index, size in enumerate(sizes)]
    return make_scheduler(*sequences, num_pages=13, prefill_chunk=64, max_num_seqs=8, **options)


def test_without_skip_ahead_no_sequence_overtakes() -> None:
    assert set(chunks_of(advance(held_back()))) == {0}


def test_with_skip_ahead_later_sequences_start_first() -> None:
    assert set(chunks_of(advance(held_back(skip_ahead=1)))) == {0, 2, 3, 4}


def test_no_sequence_is_overtaken_more_often_than_max_prefill_skip() -> None:
    scheduler = held_back(skip_ahead=4, max_prefill_skip=2)
    assert set(chunks_of(advance(scheduler))) == {0, 2, 3}
    assert scheduler.live[1, 0].num_overtaken == 2
    assert not set(chunks_of(advance(scheduler))) & {1, 4}


@pytest.mark.parametrize(("skip_ahead", "starts"), [(1, False), (2, True)])
def test_skip_ahead_tries_a_limited_number_of_sequences(skip_ahead: int, starts: bool) -> None:
    sizes = (20, 32, 32, 2)
    sequences = [make_sequence(index, num_tokens=size, max_tokens=12) for index, size in enumerate(sizes)]
    scheduler = make_scheduler(*sequences, num_pages=13, prefill_chunk=64, skip_ahead=skip_ahead)
    assert (3 in chunks_of(advance(scheduler))) == starts


def test_preempted_sequence_is_never_overtaken() -> None:
    scheduler = make_scheduler(make_sequence(0, num_tokens=20), num_pages=13, prefill_chunk=64, skip_ahead=1)
    advance(scheduler)
    preempted = make_sequence(1, num_tokens=32)
    preempted.num_preemptions = 1
    for sequence in (preempted, make_sequence(2, num_tokens=2)):
        scheduler.add(sequence)
    assert set(chunks_of(advance(scheduler))) == {0}


def test_skipped_sequences_keep_their_place() -> None:
    scheduler = held_back(skip_ahead=1)
    advance(scheduler)
    assert [sequence.arrival for sequence in scheduler.waiting] == [1]
    scheduler.release((0, 0))
    assert 1 in chunks_of(advance(scheduler))
