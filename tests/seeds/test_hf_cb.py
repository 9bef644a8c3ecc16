"""The transformers continuous-batching schedulers (R-HF-1 to R-HF-9, 15 to 17, 20 to 25)."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from tests.pipeline.checks import expected
from tests.seeds.support import end_all, outcome, settle, trace
from tests.waiting import eventually
from tests.workers.execute.factories import (
    advance,
    chunks_of,
    expected_output,
    make_engine,
    make_scheduler,
    make_sequence,
    make_sequences,
)
from triptych import Client, Driver
from triptych.protocol.errors import TriptychError
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.scheduling.queues import WaitingQueue
from triptych.workers.execute.step import StepResult

if TYPE_CHECKING:
    from tests.seeds.tiny_engine import TinyEngine


def test_r_hf_1_requests_wait_in_order_of_arrival() -> None:
    """First in, first out, whatever the order in which they reach the scheduler."""
    scheduler = make_scheduler(*(make_sequence(index) for index in (3, 1, 2, 0)), max_num_batched_tokens=5)
    assert [s.arrival for s in scheduler.waiting] == [0, 1, 2, 3]
    assert [advance(scheduler).started for _ in range(2)] == [[(0, 0)], [(1, 0)]]


def test_r_hf_2_plan_preemption_and_idleness_are_distinguished() -> None:
    """None means idle, a plan without chunks frees memory, and a prompt that can never fit is refused instead of
    blocking.
    """
    assert make_scheduler().plan() is None
    scheduler = make_scheduler(make_sequence(num_tokens=8, max_tokens=30), num_pages=3)
    advance(scheduler)
    scheduler.cache.pool.allocate(1)
    blocked = advance(scheduler)
    assert (blocked.chunks, blocked.preempted) == ((), ((0, 0),))
    endless = make_scheduler(make_sequence(num_tokens=60), num_pages=4)
    assert [key for key, _ in advance(endless).failed] == [(0, 0)]
    assert not endless.live


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_r_hf_3_no_step_exceeds_the_token_budget(budget: int) -> None:
    """More decodes than the budget take turns."""
    sequences = [make_sequence(index, num_tokens=3 + 4 * index, max_tokens=9) for index in range(5)]
    engine = make_engine(*sequences, max_num_batched_tokens=budget)
    assert max(sum(chunk.num_tokens for chunk in step.plan.chunks) for step in trace(engine)) == budget
    assert [s.output_tokens.tolist() for s in sequences] == [expected_output(s) for s in sequences]
    decodes = make_scheduler(*make_sequences(4, num_tokens=1, max_tokens=60), max_num_batched_tokens=4)
    advance(decodes)
    decodes.config = dataclasses.replace(decodes.config, max_num_batched_tokens=budget)
    turns = Counter(key for _ in range(12) for key in chunks_of(advance(decodes)))
    assert turns == dict.fromkeys(range(4), 12 * min(budget, 4) // 4)


def test_r_hf_4_no_step_reads_more_of_the_cache_than_the_kv_budget() -> None:
    """A sequence that does not fit is skipped in that step, later ones may fit, and all are served in the end."""
    sequences = [make_sequence(index, num_tokens=n, max_tokens=6) for index, n in enumerate((30, 4, 30, 4))]
    engine = make_engine(*sequences, max_kv_reads=48)
    for step in trace(engine):
        assert sum(chunk.start + chunk.num_tokens for chunk in step.plan.chunks) <= 48
    assert [s.output_tokens.tolist() for s in sequences] == [expected_output(s) for s in sequences]


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_r_hf_5_pages_are_allocated_only_for_the_tokens_of_the_step(page_size: int) -> None:
    """After every step each sequence holds ceil(computed / page size) pages."""
    engine = make_engine(*make_sequences(4, num_tokens=9, max_tokens=12), page_size=page_size, num_pages=256)

    def look(_: object) -> None:
        for sequence in engine.scheduler.running.values():
            assert len(sequence.block_table) == -(-sequence.num_computed_tokens // page_size)

    trace(engine, each=look)


def test_r_hf_6_decode_that_needs_no_page_runs_when_the_pool_is_full() -> None:
    """A waiting prompt that gets no page only loses its own turn."""
    scheduler = make_scheduler(make_sequence(0, num_tokens=13), num_pages=4, prefill_chunk=16)
    advance(scheduler)
    scheduler.add(make_sequence(1))
    assert scheduler.cache.num_available == 0
    assert [chunks_of(advance(scheduler)) for _ in range(3)] == [{0: 1}] * 3


@pytest.mark.parametrize("left", [1, 2, 6])
def test_r_hf_7_prompt_longer_than_the_rest_of_the_budget_is_split(left: int) -> None:
    """The chunk has the rest of the budget, and the next step continues after it."""
    decodes = make_sequences(2, num_tokens=1, max_tokens=30)
    engine = make_engine(*decodes, max_num_batched_tokens=2 + left)
    engine.step()
    prompt = make_sequence(2, num_tokens=14, max_tokens=3)
    engine.add(prompt)
    chunks = [chunk for step in trace(engine) for chunk in step.plan.chunks if chunk.key == prompt.key]
    starts = [chunk.start for chunk in chunks if chunk.num_tokens > 1 or chunk.start < 14]
    assert starts == list(range(0, 14, left))
    assert prompt.output_tokens.tolist() == expected_output(prompt)


def test_r_hf_8_result_that_arrives_after_the_end_is_discarded() -> None:
    """Pages of a sequence that ended during a planned step stay out of the pool until that step has completed."""
    first, second = make_sequences(2, num_tokens=4, max_tokens=12)
    engine = make_engine(first, second, num_pages=8)
    engine.step()
    plan = engine.plan()
    assert plan is not None
    pages = set(first.block_table)
    engine.release(first.key)
    assert pages.isdisjoint(engine.scheduler.cache.pool.allocate(engine.scheduler.cache.pool.num_free))
    engine.launch(plan)
    assert set(engine.collect().progress.by_key()) == {second.key}
    assert pages <= set(engine.scheduler.cache.pool._free)


def test_r_hf_9_only_the_last_chunk_of_a_prompt_samples() -> None:
    """No token is sampled while part of the prompt is missing."""
    steps = trace(make_engine(make_sequence(num_tokens=27, max_tokens=1), prefill_chunk=8))
    assert [step.plan.sampled for step in steps] == [[], [], [], [(0, 0)]]
    assert [len(step.progress.keys) for step in steps] == [0, 0, 0, 1]


def test_r_hf_15_padding_reads_and_writes_only_the_trash_page(tiny: TinyEngine) -> None:
    """With NaN in the trash page, the answers of sequences of all lengths are unchanged."""
    sequences = [make_sequence(index, num_tokens=n, max_tokens=6) for index, n in enumerate((1, 9, 30))]
    for pages in tiny.pages:
        pages[0] = torch.nan
    try:
        outputs = tiny.run(*sequences)
    finally:
        for pages in tiny.pages:
            pages[0] = 0
    assert outputs == [tiny.greedy(s.tokens[: s.num_prompt_tokens].tolist(), 6) for s in sequences]


def test_r_hf_16_fifo_schedules_decodes_then_started_prompts_then_waiting_ones() -> None:
    """A new prompt never stalls a decode, which gets a token in every step."""
    scheduler = make_scheduler(make_sequence(0, num_tokens=2, max_tokens=40), max_num_batched_tokens=9)
    advance(scheduler)
    for index in (1, 2, 3):
        scheduler.add(make_sequence(index, num_tokens=12))
    assert [chunks_of(advance(scheduler)) for _ in range(3)] == [{0: 1, 1: 8}, {0: 1, 1: 4, 2: 4}, {0: 1, 1: 1, 2: 7}]


@pytest.mark.parametrize(("margin", "starts"), [(0.0, True), (0.2, False), (1.0, False)])
def test_r_hf_17_below_the_safety_margin_no_new_prompt_starts(margin: float, starts: bool) -> None:
    """With 85 of 100 pages used a prompt waits; if nothing runs, one always starts."""
    scheduler = make_scheduler(
        make_sequence(0, num_tokens=85), page_size=1, num_pages=100, prefill_chunk=128, safety_margin=margin
    )
    assert 0 in chunks_of(advance(scheduler))
    scheduler.add(make_sequence(1, num_tokens=3))
    assert (1 in chunks_of(advance(scheduler))) is starts


def test_r_hf_20_aborted_request_frees_its_pages_before_the_next_step(driver: Driver) -> None:
    """In every state, twice, from any thread, and for unknown ids."""
    engine = make_engine(*make_sequences(6, num_tokens=6), max_num_seqs=4, num_pages=12, max_num_batched_tokens=7)
    engine.step()
    engine.step()
    for index in (5, 3, 1, 0, 0, 99):
        engine.release((index, 0))
    engine.check()
    assert {key[0] for key in engine.scheduler.live} == {2, 4}
    assert engine.scheduler.cache.num_available == 12 - engine.stats.num_held_pages
    answers = end_all(driver.submit([1, index], max_tokens=4000) for index in range(1, 40))
    assert {getattr(answer, "finish_reason", answer) for answer in answers} == {"abort"}


def test_r_hf_21_status_of_an_unknown_id_is_unknown(driver: Driver) -> None:
    """Not an exception, for ids that never existed and for forgotten ones."""
    gone = driver.generate([1, 2], max_tokens=1).request_id
    settle(driver)
    assert [driver.client.status(request_id).state for request_id in ("never", gone)] == ["unknown", "unknown"]


def test_r_hf_22_after_a_preemption_no_new_request_starts_until_a_sequence_finishes() -> None:
    """New requests may start when a running sequence finishes; if nothing runs, none is held back."""
    scheduler = make_scheduler(*make_sequences(2, num_tokens=20, max_tokens=60), num_pages=24, page_size=2)
    while not scheduler.roster.num_preemptions:
        advance(scheduler)
    scheduler.add(make_sequence(2, num_tokens=1))
    assert scheduler.cache.num_available > 8
    assert [set(chunks_of(advance(scheduler))) for _ in range(4)] == [{0}] * 4
    scheduler.release((0, 0))
    assert 2 in chunks_of(advance(scheduler))


class FailsAtLength(HashRunner):
    """Reports the first sequence as failed once its context has twelve tokens."""

    def collect(self) -> StepResult:
        result = super().collect()
        failed = {0: "not a number"} if self._length == 12 else {}
        return StepResult(result.token_ids, result.logprobs, failed)

    def launch(self, inputs: object) -> None:
        self._length = int(inputs.context_lens[0])  # type: ignore[attr-defined]
        super().launch(inputs)  # type: ignore[arg-type]


def test_r_hf_23_error_contains_the_tokens_produced_before_it(slow: Driver) -> None:
    """A failing engine keeps the sequence's tokens, and a client finds those it received in ``error.partial``."""
    sequence = make_sequence(num_tokens=5, max_tokens=30)
    engine = make_engine(sequence, runner=FailsAtLength)
    trace(engine)
    assert (sequence.finish_reason, sequence.output_tokens.tolist()) == ("error", expected_output(sequence)[:7])
    with Client(slow.run_dir) as client:
        stream = client.submit([1, 2], max_tokens=4000, lease_s=0.5)
        next(iter(stream))
    error = outcome(stream)
    assert isinstance(error, TriptychError)
    tokens = error.partial.token_ids
    assert tokens
    assert tokens == expected([1, 2], len(tokens))
    eventually(lambda: slow.client.status(stream.request_id).state == "unknown")


def test_r_hf_24_ten_thousand_waiting_requests_do_not_slow_a_step() -> None:
    """Adding, finding the head and removing cost the same among 20,000 as among 500."""

    def seconds(count: int) -> float:
        queue = WaitingQueue(lambda sequence: (sequence.arrival,))
        sequences = make_sequences(count, num_tokens=1, max_tokens=1)
        random.Random(24).shuffle(sequences)
        began = time.thread_time()
        for sequence in sequences:
            queue.push(sequence)
        for sequence in sequences[::2]:
            queue.remove(sequence.key)
        while (head := queue.head) is not None:
            queue.remove(head.key)
        return (time.thread_time() - began) / count

    assert min(seconds(20_000) for _ in range(3)) < 8 * min(seconds(500) for _ in range(3))


def test_r_hf_25_restarted_execute_begins_with_an_empty_pool_and_continues() -> None:
    """The new process holds the pages of the requests it took over and no others."""
    with Driver("hash-lm", hash_step_ms=2.0, max_num_seqs=2) as driver:
        stream = driver.submit([4, 5], max_tokens=150)
        next(iter(stream))
        driver.restart("execute")
        assert stream.result(60).token_ids == expected([4, 5], 150)
        eventually(lambda: driver.stats()["execute"]["epoch"] == 2)
        settle(driver)
