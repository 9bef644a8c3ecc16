"""Which sequences are in a step, and with how many tokens. What the first requirements say is in ``tests/seeds``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.execute.factories import (
    advance,
    advance_until,
    chunks_of,
    make_scheduler,
    make_sequence,
    make_sequences,
    recover,
)
from triptych.workers.execute.scheduling.audit import Stats, check, take_stats
from triptych.workers.execute.scheduling.limbo import Limbo
from triptych.workers.execute.scheduling.plan import MAX_SCORED_TOKENS, Draft
from triptych.workers.execute.scheduling.prefix import NO_MATCH
from triptych.workers.execute.scheduling.scheduler import Scheduler


def test_limit_on_rows_of_logits_is_only_for_prompts_that_need_them() -> None:
    sequences = [make_sequence(0, num_tokens=600, prompt_logprobs=0), make_sequence(1, num_tokens=600)]
    scheduler = make_scheduler(*sequences, num_pages=400, prefill_chunk=1024, max_num_batched_tokens=2048)
    assert chunks_of(advance(scheduler)) == {0: MAX_SCORED_TOKENS, 1: 600}


def test_prompts_get_little_of_a_step_with_decodes() -> None:
    scheduler = make_scheduler(make_sequence(0, num_tokens=20, max_tokens=4), mixed_prefill_tokens=3)
    assert [chunks_of(advance(scheduler)) for _ in range(3)] == [{0: 8}, {0: 8}, {0: 4}]
    for index in (1, 2):
        scheduler.add(make_sequence(index, num_tokens=2 + index))
    steps = [chunks_of(advance(scheduler)) for _ in range(4)]
    assert steps == [{0: 1, 1: 3}, {0: 1, 1: 1, 2: 3}, {0: 1, 1: 1, 2: 1}, {1: 1, 2: 1}]


def test_ready_sequences_get_rows_in_order_of_arrival() -> None:
    sequences = make_sequences(3, num_tokens=4)
    scheduler = make_scheduler(*sequences, max_num_seqs=2, prefill_chunk=16)
    advance(scheduler)
    advance(scheduler)
    assert [sequence.row for sequence in sequences] == [0, 1, None]


def test_key_cannot_be_live_twice() -> None:
    scheduler = make_scheduler(make_sequence(0))
    with pytest.raises(AssertionError, match="already live"):
        scheduler.add(make_sequence(0))


# The margin


@pytest.mark.parametrize(("margin", "starts"), [(0.0, True), (0.15, True), (0.16, False), (1.0, False)])
def test_prompt_starts_only_if_it_leaves_the_margin_free(margin: float, starts: bool) -> None:
    scheduler = make_scheduler(make_sequence(0, num_tokens=80), num_pages=100, page_size=1, safety_margin=margin)
    advance(scheduler)
    scheduler.add(make_sequence(1, num_tokens=5))
    assert (1 in chunks_of(advance(scheduler))) == starts


def test_one_page_is_kept_free_even_without_a_margin() -> None:
    scheduler = make_scheduler(*make_sequences(2, num_tokens=8), num_pages=4, prefill_chunk=16)
    assert chunks_of(advance(scheduler)) == {0: 8}


def test_pages_still_needed_by_started_prompts_are_not_promised_twice() -> None:
    scheduler = make_scheduler(*make_sequences(2, num_tokens=40), num_pages=16, max_num_batched_tokens=16)
    assert chunks_of(advance(scheduler)) == {0: 8}


def test_limbo_is_not_searched_while_enough_pages_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind 25,000 pages in limbo, the starts of 40 prompts took 7 ms each."""
    scheduler = make_scheduler(make_sequence(0, num_tokens=9, max_tokens=1))
    advance_until(scheduler, lambda plan: not scheduler.live)
    assert scheduler.cache.limbo.num_pages == 3
    monkeypatch.setattr(Limbo, "reclaimable", None)
    for sequence in make_sequences(4)[1:]:
        scheduler.add(sequence)
    assert len(advance(scheduler).starts) == 3


# Preemption


def preempted_pair() -> Scheduler:
    """Two sequences that outgrew four pages of two tokens, just after 1 was preempted for 0."""
    scheduler = make_scheduler(*make_sequences(2, num_tokens=2, max_tokens=30), num_pages=4, page_size=2)
    advance_until(scheduler, lambda plan: plan.preempted)
    return scheduler


def test_preempted_sequence_is_not_resumed_in_the_same_step() -> None:
    scheduler = make_scheduler(*make_sequences(2, num_tokens=2, max_tokens=30), num_pages=4, page_size=2)
    plan = advance_until(scheduler, lambda plan: plan.preempted)
    assert plan.preempted == ((1, 0),)
    assert set(chunks_of(plan)) == {0}


def test_preempted_sequence_keeps_its_tokens_and_recomputes_them() -> None:
    scheduler = preempted_pair()
    second = scheduler.live[1, 0]
    num_tokens = second.num_tokens
    scheduler.release((0, 0))
    assert chunks_of(advance(scheduler)) == {1: num_tokens}
    assert second.num_tokens == num_tokens + 1


def test_preempted_sequence_longer_than_the_token_budget_is_resumed_in_chunks() -> None:
    sequence = recover(make_sequence(0, num_tokens=4, max_tokens=30), 20)
    sequence.num_preemptions = 1
    scheduler = make_scheduler(sequence, max_num_batched_tokens=7)
    assert [chunks_of(advance(scheduler))[0] for _ in range(4)] == [7, 7, 7, 3]


def test_after_a_preemption_new_sequences_are_admitted_once_the_preempted_one_resumed() -> None:
    scheduler = make_scheduler(*make_sequences(2, num_tokens=4, max_tokens=30), num_pages=10)
    advance(scheduler)
    taken = scheduler.cache.pool.allocate(8)
    assert advance(scheduler).preempted == ((1, 0),)
    scheduler.cache.pool.free(taken)
    scheduler.add(make_sequence(2, num_tokens=4))
    assert set(chunks_of(advance(scheduler))) == {0, 1, 2}


def test_after_a_preemption_new_sequences_are_admitted_if_the_preempted_one_is_aborted() -> None:
    """The other one has half of the pages, and goes on for long."""
    sequences = [make_sequence(0, num_tokens=8, max_tokens=80), make_sequence(1, num_tokens=12, max_tokens=60)]
    scheduler = make_scheduler(*sequences, num_pages=24, prefill_chunk=64)
    advance_until(scheduler, lambda plan: plan.preempted)
    scheduler.release((1, 0))
    scheduler.add(make_sequence(2))
    assert advance(scheduler).started == [(2, 0)]


def test_preempted_sequence_is_removed_from_the_step_that_preempts_it() -> None:
    early, late = make_sequence(0, num_tokens=7, max_tokens=30), make_sequence(1, num_tokens=2, max_tokens=30)
    scheduler = make_scheduler(late, num_pages=4)
    advance(scheduler)
    scheduler.add(early)  # as after a recovery: arrived first, but in the second row
    plan = advance_until(scheduler, lambda plan: plan.preempted)
    assert plan.preempted == (late.key,)
    assert chunks_of(plan) == {0: 1}


def test_prefilling_sequence_is_preempted_and_starts_over() -> None:
    decode, prompt = make_sequence(0, num_tokens=8, max_tokens=30), make_sequence(1, num_tokens=16)
    scheduler = make_scheduler(decode, num_pages=8, prefill_chunk=8, max_num_batched_tokens=9)
    advance(scheduler)
    scheduler.add(prompt)
    advance(scheduler)
    scheduler.cache.pool.allocate(scheduler.cache.pool.num_free)
    plan = advance_until(scheduler, lambda plan: plan.preempted)
    assert plan.preempted == (prompt.key,)
    assert prompt.num_computed_tokens == 0


def test_two_half_computed_prompts_that_fill_the_pool_do_not_deadlock() -> None:
    scheduler = make_scheduler(*make_sequences(2, num_tokens=16), num_pages=16, page_size=2, max_num_batched_tokens=8)
    first, second = scheduler.live.values()
    advance(scheduler)
    scheduler.roster.start(second, NO_MATCH, Draft(2, 8))
    scheduler.cache.extend(second, 8)
    second.num_computed_tokens = 8
    scheduler.cache.pool.allocate(scheduler.cache.pool.num_free)
    plan = advance(scheduler)
    assert plan.preempted == (second.key,)
    assert chunks_of(plan) == {0: 8}
    assert first.num_output_tokens == 1


def test_chunk_shrinks_to_the_remaining_pages() -> None:
    scheduler = make_scheduler(make_sequence(num_tokens=16), num_pages=8, prefill_chunk=16)
    scheduler.cache.pool.allocate(5)
    assert chunks_of(advance(scheduler)) == {0: 12}


# Sequences that do not fit at all


def test_sequence_that_fills_the_pool_alone_ends_with_length() -> None:
    sequence = make_sequence(num_tokens=4, max_tokens=100)
    scheduler = make_scheduler(sequence, num_pages=4)
    plan = advance_until(scheduler, lambda _: not scheduler.live)
    assert plan.finished == ((sequence.key, "length"),)
    assert plan.preempted == ()
    assert sequence.num_tokens == 4 * 4 + 1


@pytest.mark.parametrize("options", [{"num_pages": 4}, {"max_model_len": 17}], ids=["pool", "context"])
def test_prompt_that_can_never_fit_fails_with_numbers_and_the_next_one_runs(options: dict[str, Any]) -> None:
    scheduler = make_scheduler(make_sequence(0, num_tokens=17), make_sequence(1), **options)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.failed == (((0, 0), "prompt has 17 tokens, the limit is 16"),)
    assert chunks_of(plan) == {1: 5}
    assert scheduler.apply(plan, [1]).failed == dict(plan.failed)


def test_recovered_sequence_that_had_ended_finishes_without_a_step() -> None:
    scheduler = make_scheduler(recover(make_sequence(max_tokens=3), 3))
    plan = advance(scheduler)
    assert plan.chunks == ()
    assert plan.finished == (((0, 0), "length"),)


def test_recovered_sequence_that_outgrew_the_pool_ends_with_length() -> None:
    scheduler = make_scheduler(recover(make_sequence(num_tokens=10, max_tokens=20), 9), num_pages=4)
    assert advance(scheduler).finished == (((0, 0), "length"),)


# Limbo, and what is counted


def test_pages_in_limbo_are_reused_before_a_preemption() -> None:
    ended, running = make_sequence(0, num_tokens=8, max_tokens=1), make_sequence(1, num_tokens=8, max_tokens=20)
    scheduler = make_scheduler(ended, running, num_pages=7, prefill_chunk=16)
    advance_until(scheduler, lambda _: not scheduler.live)
    assert running.num_output_tokens == 20
    assert scheduler.roster.num_preemptions == 0
    scheduler.release(ended.key)
    check(scheduler)


def test_stats_account_for_every_page_and_sequence() -> None:
    sequences = [*make_sequences(5, num_tokens=4), make_sequence(5, num_tokens=12)]
    scheduler = make_scheduler(*sequences, num_pages=16, max_num_seqs=4, prefill_chunk=4, max_num_batched_tokens=20)
    advance(scheduler)
    advance(scheduler)
    assert take_stats(scheduler) == Stats(
        num_waiting=0,
        num_prefilling=1,
        num_ready=1,
        num_decoding=4,
        num_pages=16,
        num_free_pages=6,
        num_held_pages=10,
        num_limbo_pages=0,
        num_table_entries=10,
        num_lost_pages=0,
    )


def test_lost_page_is_visible_in_the_stats() -> None:
    scheduler = make_scheduler(num_pages=8)
    scheduler.cache.pool.allocate(1)
    assert take_stats(scheduler).num_lost_pages == 1
