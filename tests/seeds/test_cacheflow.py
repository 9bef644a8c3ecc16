"""Cacheflow's single sequences: order, preemption with recomputation, pages and statistics (R-CF)."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.pipeline.checks import expected
from tests.seeds.support import trace
from tests.waiting import eventually
from tests.workers.execute.factories import (
    advance,
    chunks_of,
    expected_output,
    make_engine,
    make_scheduler,
    make_sequence,
    make_sequences,
    run,
)
from triptych import Driver
from triptych.protocol.errors import RequestTooLong
from triptych.workers.execute.scheduling.pages import PageLedgerError, PagePool
from triptych.workers.execute.scheduling.sequence import SequenceState


def test_r_cf_3_order_is_first_come_first_served() -> None:
    """The order is that of the sequence number assigned at acceptance, never of a clock, and survives a preemption."""
    scheduler = make_scheduler(*(make_sequence(i, num_tokens=2, max_tokens=30) for i in (2, 0, 1)), num_pages=4)
    assert [s.arrival for s in scheduler.waiting] == [0, 1, 2]
    while not scheduler.roster.num_preemptions:
        advance(scheduler)
    assert min(s.arrival for s in scheduler.running.values()) == 0
    waiting = [s.arrival for s in scheduler.waiting]
    assert waiting == sorted(waiting)


def test_r_cf_4_running_sequence_is_not_preempted_while_pages_suffice() -> None:
    """If there are pages for all complete answers, a started sequence runs until its end."""
    sequences = make_sequences(4, num_tokens=7, max_tokens=21)
    engine = make_engine(*sequences, num_pages=4 * 7 + 1, page_size=4)
    steps = trace(engine)
    assert engine.scheduler.roster.num_preemptions == 0
    assert [key for step in steps for key in step.plan.started] == [s.key for s in sequences]


def test_r_cf_5_latest_arrival_is_preempted_first_and_the_one_in_need_last() -> None:
    """Victims are chosen in reverse order of arrival; a single sequence preempts itself and resumes later."""
    sequences = make_sequences(4, num_tokens=4, max_tokens=40)
    scheduler = make_scheduler(*sequences, num_pages=9, page_size=4, prefill_chunk=32)
    victims: list[int] = []
    while len(victims) < 3:
        victims += [key[0] for key in advance(scheduler).preempted]
    assert victims == [3, 2, 1]
    alone = make_scheduler(make_sequence(num_tokens=4, max_tokens=9), num_pages=3)
    advance(alone)
    borrowed = alone.cache.pool.allocate(2)
    assert advance(alone).preempted == ((0, 0),)
    alone.cache.pool.free(borrowed)
    assert chunks_of(advance(alone)) == {0: 5}


def test_r_cf_7_preempted_answer_has_no_gap_and_no_repetition(small: Driver) -> None:
    """Answers from a pool of twelve pages equal those from a large one, token by token, in the stream too."""
    before = small.stats()["execute"]["preemptions"]
    prompts = [[7, index, 3] for index in range(1, 33)]
    streams = [small.submit(prompt, max_tokens=40) for prompt in prompts]
    for stream, prompt in zip(streams, prompts, strict=True):
        pieces = [i for delta in stream for i in delta.token_ids]
        assert pieces == stream.result(20).token_ids == expected(prompt, 40)
    eventually(lambda: small.stats()["execute"]["preemptions"] > before)
    assert any(stream.result().ledger["num_preemptions"] for stream in streams)


def test_r_cf_10_preempted_sequences_resume_before_new_ones_start() -> None:
    """While a preempted sequence waits, no new prompt is admitted, however small."""
    scheduler = make_scheduler(*make_sequences(2, num_tokens=2, max_tokens=30), num_pages=4, page_size=2)
    while not scheduler.roster.num_preemptions:
        advance(scheduler)
    scheduler.add(make_sequence(2, num_tokens=1))
    started: list[int] = []
    while not started:
        started += [key[0] for key in advance(scheduler).started]
    assert started[0] == 1


def test_r_cf_11_head_of_the_queue_is_never_overtaken(small: Driver) -> None:
    """The first prompt that does not fit stops those behind it; one that can never fit is refused at submit."""
    running, large, little = make_sequence(0, num_tokens=8), make_sequence(1, num_tokens=30), make_sequence(2)
    scheduler = make_scheduler(running, large, little, num_pages=9, prefill_chunk=64)
    plan = advance(scheduler)
    assert chunks_of(plan) == {0: 8}
    assert [s.key for s in scheduler.waiting] == [large.key, little.key]
    with pytest.raises(RequestTooLong, match="prompt has 60 tokens, the limit is 47"):
        small.generate([1] * 60)


def test_r_cf_12_step_counts_one_token_per_decode_and_the_length_of_each_chunk() -> None:
    """Both are subtracted from the token budget of the step."""
    scheduler = make_scheduler(*make_sequences(3, num_tokens=2), max_num_batched_tokens=10)
    advance(scheduler)
    scheduler.add(make_sequence(3, num_tokens=20))
    plan = advance(scheduler)
    assert chunks_of(plan) == {0: 1, 1: 1, 2: 1, 3: 7}
    assert (plan.num_decodes, plan.num_prefill_tokens) == (3, 7)


def test_r_cf_17_stop_ids_and_max_tokens_end_each_sequence_separately(driver: Driver) -> None:
    """The stop token is kept in the ids; the finish_reason says which of the two applied."""
    tokens = expected([2, 3], 30)
    stopped = driver.submit([2, 3], max_tokens=30, stop_token_ids=[tokens[11]])
    full = driver.submit([2, 3], max_tokens=30)
    end = tokens.index(tokens[11]) + 1
    assert (stopped.result(20).token_ids, stopped.result().finish_reason) == (tokens[:end], "stop")
    assert (full.result(20).token_ids, full.result().finish_reason) == (tokens, "length")


def test_r_cf_18_finished_sequence_frees_its_row_and_pages_at_once() -> None:
    """The others continue, and memory does not grow with the number of served sequences."""
    long = make_sequence(0, num_tokens=4, max_tokens=60)
    engine = make_engine(long, num_pages=32)
    for index in range(1, 11):
        short = make_sequence(index, num_tokens=9, max_tokens=2)
        engine.add(short)
        while short.key in engine.scheduler.live:
            engine.step()
        engine.release(short.key)
        assert short.row is None
        assert engine.stats.num_limbo_pages == 0
    assert list(engine.scheduler.live) == [long.key]
    assert len(engine.scheduler.rows) == 1
    run(engine)
    assert long.output_tokens.tolist() == expected_output(long)


def test_r_cf_20_plan_has_all_new_tokens_of_prompts_and_the_last_one_of_decodes() -> None:
    """With the start of each, and a block table for each sequence that covers its context."""
    scheduler = make_scheduler(make_sequence(0, num_tokens=6))
    advance(scheduler)
    scheduler.add(make_sequence(1, num_tokens=5))
    plan = scheduler.plan()
    assert plan is not None
    assert [(c.key[0], c.start, c.num_tokens, c.samples) for c in plan.chunks] == [(0, 6, 1, True), (1, 0, 5, True)]
    assert [len(scheduler.running[chunk.key].block_table) for chunk in plan.chunks] == [2, 2]


def test_r_cf_21_references_are_counted_and_misuse_raises() -> None:
    """Ten thousand random allocations, shares and frees: a page is free or has as many references as counted."""
    pool, rng = PagePool(12, 4), random.Random(21)
    tables: list[list[int]] = []
    for _ in range(10_000):
        match rng.choice("asf"):
            case "a" if pool.num_free:
                tables.append(pool.allocate(rng.randrange(1, pool.num_free + 1)))
            case "s" if tables:
                pool.share(table := list(rng.choice(tables)))
                tables.append(table)
            case "f" if tables:
                pool.free(tables.pop(rng.randrange(len(tables))))
        pool.check(tables, [])
    for table in tables:
        pool.free(table)
    assert pool.num_free == 12
    for misuse in (lambda: pool.free([3]), lambda: pool.share([3]), lambda: pool.allocate(13), lambda: pool.free([0])):
        with pytest.raises(PageLedgerError):
            misuse()


def test_r_cf_24_step_results_are_copies() -> None:
    """A caller that changes the outputs of a step changes nothing else."""
    sequence = make_sequence(max_tokens=5)
    engine = make_engine(sequence)
    step = engine.step()
    assert step is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.plan.step = 7  # type: ignore[misc]
    step.progress.keys.clear()
    step.progress.finished[sequence.key] = "stop"
    run(engine)
    assert sequence.output_tokens.tolist() == expected_output(sequence)


# Defects


@pytest.mark.parametrize("num_emitted", [0, 15])
def test_n_cf_1_prompt_longer_than_the_budget_or_almost_the_pool_does_not_block_the_queue(num_emitted: int) -> None:
    """A prompt of all pages but one, new or preempted with its output, runs in chunks, and those behind it follow."""
    long = make_sequence(0, num_tokens=40, max_tokens=20)
    for token_id in expected_output(long)[:num_emitted]:
        long.append(token_id)
    others = [make_sequence(index, num_tokens=6, max_tokens=4) for index in (1, 2, 3)]
    outputs = run(make_engine(long, *others, num_pages=15, max_num_batched_tokens=7, safety_margin=0.2))
    assert [outputs[s.key] for s in (long, *others)] == [expected_output(s) for s in (long, *others)]


def test_n_cf_2_limits_count_sequences() -> None:
    """Never more decodes in a step than rows, never more live sequences than max_live."""
    engine = make_engine(*make_sequences(6, num_tokens=3), max_num_seqs=4)
    assert max(step.plan.num_decodes for step in trace(engine)) == 4
    scheduler = make_scheduler(*make_sequences(6), max_num_seqs=4)
    with pytest.raises(AssertionError, match="6 live, the limit is 6"):
        scheduler.add(make_sequence(6))


@pytest.mark.parametrize("page_size", [1, 2, 8, 64])
def test_n_cf_4_length_of_the_block_table_determines_when_a_page_is_needed(page_size: int) -> None:
    """Also for pages of a single token, and after chunks that end anywhere in a page."""
    sequence = make_sequence(num_tokens=11, max_tokens=30)
    outputs = run(make_engine(sequence, page_size=page_size, prefill_chunk=3, num_pages=-(-41 // page_size)))
    assert outputs[sequence.key] == expected_output(sequence)


def test_n_cf_5_tokens_are_counted_per_sequence_over_preemptions() -> None:
    """However often it was preempted, a sequence has exactly max_tokens in the end."""
    sequences = [make_sequence(index, num_tokens=3, max_tokens=20 + index) for index in range(5)]
    engine = make_engine(*sequences, num_pages=7)
    outputs = run(engine)
    assert max(s.num_preemptions for s in sequences) >= 1
    assert [len(outputs[s.key]) for s in sequences] == [20 + index for index in range(5)]


@pytest.mark.parametrize("num_steps", range(8))
def test_n_cf_7_request_can_be_aborted_in_every_state(num_steps: int) -> None:
    """Waiting, prefilling, ready, decoding, preempted: its pages and its row are free, and the others undisturbed."""
    sequences = make_sequences(5, num_tokens=9, max_tokens=12)
    engine = make_engine(*sequences, num_pages=12, max_num_batched_tokens=5 + num_steps)
    for _ in range(3 * num_steps):
        engine.step()
    victims = [s for s in sequences if s.state is not SequenceState.FINISHED][::2]
    for victim in victims:
        engine.release(victim.key)
    run(engine)
    for sequence in sequences:
        engine.release(sequence.key)
        if sequence not in victims:
            assert sequence.output_tokens.tolist() == expected_output(sequence)
    assert engine.stats.num_free_pages == 12


def test_n_cf_9_no_sequence_is_preempted_in_the_middle_of_a_page() -> None:
    """Decodes that need no page preempt no other sequence, even if none is free."""
    scheduler = make_scheduler(*make_sequences(3, num_tokens=5), num_pages=7, prefill_chunk=16)
    advance(scheduler)
    scheduler.cache.pool.allocate(scheduler.cache.pool.num_free)
    assert [advance(scheduler).preempted for _ in range(3)] == [()] * 3
    assert scheduler.roster.num_preemptions == 0


def test_n_cf_10_prompt_of_8000_tokens_stalls_no_decode() -> None:
    """It runs in chunks beside the decodes, which get a token in every step."""
    scheduler = make_scheduler(
        *make_sequences(3, num_tokens=2, max_tokens=60), num_pages=4096, prefill_chunk=512, max_model_len=9000
    )
    advance(scheduler)
    scheduler.add(make_sequence(3, num_tokens=8000))
    plans = [advance(scheduler) for _ in range(16)]
    assert {plan.num_decodes for plan in plans} == {3}
    assert sum(plan.num_prefill_tokens for plan in plans) == 8000
