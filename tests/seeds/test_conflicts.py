"""Our rule where the reference systems disagree (C-1 to C-15)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.checks import expected
from tests.seeds.support import Clock, end_all, outcome, sequence_of, trace
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
from triptych import Client, Driver
from triptych.protocol.errors import DuplicateId, InvalidRequest, Overloaded, RequestTooLong
from triptych.workers.execute.scheduling.sequence import SequenceState

if TYPE_CHECKING:
    from tests.seeds.tiny_engine import TinyEngine


def test_c_1_cache_is_in_pages_and_a_row_is_only_a_place_in_the_batch() -> None:
    """Ready and preempted sequences have no row; the lowest free row is taken."""
    sequences = make_sequences(6, num_tokens=4, max_tokens=20)
    engine = make_engine(*sequences, num_pages=14)

    def look(_: object) -> None:
        rows = [s.row for s in sequences if s.row is not None]
        assert len(set(rows)) == len(rows)
        assert all((s.row is not None) == (s.state is SequenceState.DECODING) for s in sequences)
        assert all(bool(s.block_table) == (s.key in engine.scheduler.running) for s in sequences)

    trace(engine, each=look)
    assert engine.scheduler.roster.num_preemptions > 0


def test_c_2_queue_live_sequences_and_rows_have_separate_limits(slow: Driver) -> None:
    """Two rows, three live, 64 waiting; a ready sequence takes a row in the step after it was freed."""
    streams = [slow.submit([1, index % 250], max_tokens=4000) for index in range(1, 100)]
    accepted = [s for s in streams if not isinstance(_refusal(s), Overloaded)]

    def live() -> tuple[int, int, int]:
        stats = slow.stats()
        return stats["prepare"]["live"], stats["execute"]["decoding"], stats["execute"]["ready"]

    eventually(lambda: live() == (3, 2, 1))
    assert 0 < slow.stats()["prepare"]["waiting"] <= 64
    assert 64 <= len(accepted) <= 70
    end_all(streams)


def _refusal(stream: Any) -> Exception | None:
    try:
        stream.accepted(20)
    except Overloaded as error:
        return error
    return None


def test_c_3_prefill_runs_in_the_loop(slow: Driver) -> None:
    """``submit`` returns before the first chunk of a prompt of 4000 tokens is computed."""
    clock = Clock()
    streams = [slow.submit([1] * 4000, max_tokens=1) for _ in range(3)]
    assert clock.s < 0.1
    assert not any(stream.done for stream in streams)
    end_all(streams)


@pytest.mark.parametrize(("chunk", "budget"), [(4, 9), (8, 8), (8, 30), (64, 10)])
def test_c_4_chunk_is_limited_by_its_own_maximum_and_by_the_budget(chunk: int, budget: int) -> None:
    """min(remaining, prefill_chunk, budget - decodes), and several prompts share a step."""
    engine = make_engine(*make_sequences(4, num_tokens=21), prefill_chunk=chunk, max_num_batched_tokens=budget)
    steps = trace(engine)
    for step in steps:
        assert sum(c.num_tokens for c in step.plan.chunks) <= budget
        assert all(c.num_tokens <= chunk for c in step.plan.chunks)
    assert any(len(step.plan.chunks) - step.plan.num_decodes > 1 for step in steps)


def test_c_5_decodes_go_first_and_neither_decodes_nor_prompts_starve() -> None:
    """Every step contains the decodes; if they fill the budget, a prompt gets a chunk after max_prefill_skip steps."""
    scheduler = make_scheduler(
        *make_sequences(2, num_tokens=1, max_tokens=60), max_num_batched_tokens=2, max_prefill_skip=4
    )
    advance(scheduler)
    scheduler.add(make_sequence(2, num_tokens=20))
    plans = [advance(scheduler) for _ in range(30)]
    gaps = [index for index, plan in enumerate(plans) if 2 in chunks_of(plan)]
    assert gaps == list(range(4, 30, 5))
    counts = Counter(key for plan in plans for key in chunks_of(plan))
    assert min(counts[0], counts[1]) >= 24


def test_c_6_safety_margin_counts_available_pages_and_never_stops_an_empty_engine() -> None:
    """Pages in limbo count as free; at least one page stays free; if nothing runs, one prompt always starts."""
    scheduler = make_scheduler(make_sequence(0, num_tokens=36, max_tokens=1), num_pages=10, prefill_chunk=64)
    advance(scheduler)
    assert scheduler.cache.pool.num_free == 1
    scheduler.add(make_sequence(1, num_tokens=36))
    assert set(chunks_of(advance(scheduler))) == {1}
    alone = make_scheduler(make_sequence(num_tokens=16), num_pages=4, safety_margin=1.0)
    assert set(chunks_of(advance(alone))) == {0}


def test_c_7_prefixes_are_shared_by_page_and_one_token_is_always_computed(driver: Driver) -> None:
    """A page is identified by all tokens before it too: the same tokens after another prefix are another page."""
    base = [11 + i % 77 for i in range(64)]
    answers = [driver.generate(prompt, max_tokens=3) for prompt in (base, base, [200] * 16 + base[16:])]
    assert [a.token_ids for a in answers[:2]] == [expected(base, 3)] * 2
    assert [a.usage["cached_tokens"] for a in answers] == [0, 63, 0]


def test_c_8_single_sequences_are_recomputed_and_groups_swapped() -> None:
    """``auto`` chooses; the victim is the latest arrival, and keeps its place in the order."""
    scheduler = make_scheduler(*make_sequences(2, num_tokens=2, max_tokens=30), num_pages=4, preemption="auto")
    plan = advance(scheduler)
    while not plan.preempted:
        plan = advance(scheduler)
    assert plan.preempted == ((1, 0),)


def test_c_9_without_free_host_pages_sequences_are_recomputed() -> None:
    """A full swap space ends no request."""
    sequences = make_sequences(3, num_tokens=4, max_tokens=20)
    outputs = run(make_engine(*sequences, num_pages=8, preemption="swap", host_pages=1))
    assert [outputs[s.key] for s in sequences] == [expected_output(s) for s in sequences]


def test_c_10_preempted_sequences_resume_before_new_ones_start() -> None:
    """Strictly, and new ones may start again when nothing runs."""
    sequences = make_sequences(5, num_tokens=6, max_tokens=18)
    engine = make_engine(*sequences, num_pages=9)
    waiting: set[int] = set()
    for step in trace(engine):
        fresh = [key[0] for key in step.plan.started if key[0] not in waiting]
        waiting -= {key[0] for key in step.plan.started}
        assert not (waiting and fresh)
        waiting |= {key[0] for key in step.plan.preempted}
    assert engine.scheduler.roster.num_preemptions > 0


def test_c_11_first_prompt_that_does_not_fit_stops_those_behind_it() -> None:
    """Waiting prompts are strictly first come, first served."""
    scheduler = make_scheduler(make_sequence(0, num_tokens=8, max_tokens=30), num_pages=12)
    advance(scheduler)
    scheduler.add(make_sequence(1, num_tokens=40))
    scheduler.add(make_sequence(2, num_tokens=2))
    assert [set(chunks_of(advance(scheduler))) for _ in range(5)] == [{0}] * 5
    scheduler.release((0, 0))
    assert advance(scheduler).started[0] == (1, 0)


def test_c_12_id_is_the_client_s_or_generated_and_unique_among_live_requests(slow: Driver) -> None:
    """A second live request with the same id is refused as a duplicate, and the first is undisturbed."""
    mine = slow.submit([1, 2], max_tokens=100, request_id="mine")
    mine.accepted(20)
    with Client(slow.run_dir) as other:
        assert isinstance(outcome(other.submit([3, 4], request_id="mine")), DuplicateId)
    assert isinstance(outcome(slow.submit([3, 4], request_id="mine")), DuplicateId)
    assert mine.result(20).token_ids == expected([1, 2], 100)
    assert len(slow.submit([1], max_tokens=0).request_id) == 32


@pytest.mark.parametrize("num_chars", [4097, 1_000_000, 9_000_000])
def test_c_13_too_long_prompt_is_refused_at_submit_with_numbers(driver: Driver, num_chars: int) -> None:
    """For any size: tokens beyond the context, or bytes beyond the limit of a message."""
    with Client(driver.run_dir) as client:
        error = outcome(client.submit("x" * num_chars), timeout=20)
    assert isinstance(error, (RequestTooLong, InvalidRequest))
    assert str(num_chars) in str(error) or "limit" in str(error)


def test_c_14_temperature_zero_is_argmax_and_a_negative_one_an_error(tiny: TinyEngine, driver: Driver) -> None:
    """Whatever the other parameters are."""
    prompt = [61, 62]
    assert tiny.run(sequence_of(prompt, max_tokens=6, temperature=0.0, top_p=0.3)) == [tiny.greedy(prompt, 6)]
    with pytest.raises(InvalidRequest, match=r"temperature is -0.1, the limits are 0.0 and 100.0"):
        driver.generate([1], temperature=-0.1)


def test_c_15_top_k_is_off_with_none_zero_and_minus_one(tiny: TinyEngine) -> None:
    """And by default."""
    kinds: list[dict[str, Any]] = [{}, {"top_k": None}, {"top_k": 0}, {"top_k": -1}]
    sequences = [sequence_of([61, 62], i, max_tokens=9, temperature=2.0, **kind) for i, kind in enumerate(kinds)]
    for sequence in sequences:
        sequence.seed = 15
    outputs = tiny.run(*sequences)
    assert outputs == [outputs[0]] * 4
    assert outputs[0] != tiny.greedy([61, 62], 9)
