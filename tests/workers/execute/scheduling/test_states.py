"""Sequences of a recurrent model: each running one has rows for its state, and continues from it or from a snapshot."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.execute.clients import Clients
from tests.workers.execute.factories import (
    advance,
    expected_output,
    make_beams,
    make_engine,
    make_group,
    make_scheduler,
    make_sequence,
    make_sequences,
    recover,
    run,
)
from tests.workers.execute.recurrent_hash import RecurrentHashRunner
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.scheduling.audit import check
from triptych.workers.execute.scheduling.plan import Chunk
from triptych.workers.execute.scheduling.prefix import NO_MATCH, Match, PageNode, PrefixIndex
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.scheduling.states import StatePool
from triptych.workers.execute.step import StepInputs

SHARES: dict[str, Any] = {"prefix_cache": True, "num_snapshots": 4}
PAGE = 4  # tokens, in ``make_scheduler``


def rows(sequence: Sequence) -> tuple[int, int]:
    """The row with its state, and the row that its next step writes."""
    assert sequence.state_rows is not None, f"{sequence.key} does not run"
    return sequence.state_rows.current, sequence.state_rows.next


def test_running_sequence_has_a_row_to_read_and_one_to_write() -> None:
    first, second = make_sequences(2, num_tokens=2)
    scheduler = make_scheduler(first, second, num_snapshots=0)
    advance(scheduler)
    assert rows(first)[0]
    assert len({*rows(first), *rows(second)}) == 4
    before = rows(first)
    advance(scheduler)
    assert rows(first) == before[::-1]
    scheduler.release(first.key)
    assert first.state_rows is None
    check(scheduler)


def test_model_without_states_has_no_rows() -> None:
    sequence = make_sequence()
    make_scheduler(sequence).plan()
    assert sequence.state_rows is None


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "round_robin"])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_preemption_changes_no_token(policy: str, chunk: int) -> None:
    sequences = make_sequences(8, num_tokens=9, max_tokens=12)
    engine = make_engine(*sequences[:6], num_snapshots=0, num_pages=9, policy=policy, prefill_chunk=chunk)
    outputs = run(engine)
    assert sum(s.num_preemptions for s in sequences) > 0
    assert outputs == {s.key: expected_output(s) for s in sequences[:6]}


def sequences_with_common_prefix(*ends: int, num_tokens: int, max_tokens: int = 3) -> list[Sequence]:
    """Sequences whose prompts only differ in the last token."""
    sequences = [make_sequence(i, num_tokens=num_tokens, max_tokens=max_tokens, speaker=1) for i in range(len(ends))]
    for sequence, end in zip(sequences, ends, strict=True):
        sequence.tokens[num_tokens - 1] += end
    return sequences


def cached_tokens(engine: Engine, *sequences: Sequence) -> list[int]:
    """The number of cached tokens of each prompt, after all were served, one after the other."""
    for sequence in sequences:
        engine.add(sequence)
        assert run(engine) == {sequence.key: expected_output(sequence)}
        engine.release(sequence.key)
        engine.check()
    return [sequence.num_cached_tokens for sequence in sequences]


def test_without_snapshots_equal_prompts_share_nothing() -> None:
    sequences = sequences_with_common_prefix(0, 0, 0, num_tokens=12)
    engine = make_engine(*sequences, num_snapshots=0, prefix_cache=True)
    assert run(engine) == {s.key: expected_output(s) for s in sequences}
    assert sum(s.num_cached_tokens for s in sequences) == 0


@pytest.mark.parametrize("chunk", [3, 8, 64])
def test_repeated_prompt_is_not_computed_again(chunk: int) -> None:
    sequences = sequences_with_common_prefix(0, 0, 0, num_tokens=23)
    assert cached_tokens(make_engine(**SHARES, prefill_chunk=chunk), *sequences) == [0, 20, 20]


def test_next_turn_continues_from_the_last_snapshot() -> None:
    first = make_sequence(0, num_tokens=10, max_tokens=12)
    engine = make_engine(**SHARES)
    assert cached_tokens(engine, first) == [0]
    second = make_sequence(1, num_tokens=30)
    second.tokens[:22] = first.tokens
    assert cached_tokens(engine, second) == [20]  # of 21 computed tokens


def test_diverging_prompts_leave_a_snapshot_where_they_diverge() -> None:
    """The first prompt knows no others, the second finds pages but no state, and the third continues from there."""
    sequences = [make_sequence(i, num_tokens=40, speaker=1) for i in range(3)]
    for index, sequence in enumerate(sequences):
        sequence.tokens[17:40] += index
    assert cached_tokens(make_engine(**SHARES, prefill_chunk=64), *sequences) == [0, 0, 16]


def test_prompts_that_arrive_together_wait_for_their_common_prefix() -> None:
    sequences = [make_sequence(i, num_tokens=150, speaker=1, max_tokens=2) for i in range(3)]
    for index, sequence in enumerate(sequences):
        sequence.tokens[141:150] += index
    engine = make_engine(*sequences, **SHARES, prefill_chunk=256, num_pages=200)
    assert run(engine) == {s.key: expected_output(s) for s in sequences}
    assert [s.num_cached_tokens for s in sequences] == [0, 140, 140]


def test_least_recently_used_snapshot_is_evicted_first() -> None:
    """Two rows per running sequence, and two for snapshots: later prompts take those of the first."""
    engine = make_engine(prefix_cache=True, num_snapshots=2, max_num_seqs=1)
    often, once, *others = [make_sequence(i, num_tokens=9, max_tokens=1) for i in range(8)]
    cached_tokens(engine, often, once)
    for index, other in enumerate(others):
        again = make_sequence(20 + index, num_tokens=9, max_tokens=1)
        again.tokens[:9] = often.tokens[:9]
        assert cached_tokens(engine, other, again) == [0, 8]
    late = make_sequence(40, num_tokens=9, max_tokens=1)
    late.tokens[:9] = once.tokens[:9]
    assert cached_tokens(engine, late) == [0]


def test_snapshot_where_prompts_diverge_outlives_older_ones() -> None:
    """Only one that no prompt asked for makes room for the next one of its sequence. There are rows for five."""
    diverging = [make_sequence(i, num_tokens=42, max_tokens=1, speaker=1) for i in range(3)]
    for index, sequence in enumerate(diverging):
        sequence.tokens[17:42] += index
    others = [make_sequence(3 + i, num_tokens=9, max_tokens=1) for i in range(3)]
    engine = make_engine(**SHARES | {"num_snapshots": 3}, max_num_seqs=1, prefill_chunk=64)
    assert cached_tokens(engine, *diverging[:2], *others, diverging[2]) == [0, 0, 0, 0, 0, 16]


def test_snapshot_in_use_is_not_evicted() -> None:
    """Five rows, all taken: the older of two snapshots is in use, so the other one is evicted."""
    pool, index = StatePool(num_running=2, num_snapshots=1, page_size=PAGE), PrefixIndex(PAGE)
    older, newer = (index.add(index.root(b"root"), bytes([i]) * 4 * PAGE) for i in range(2))

    def leave_snapshot(node: PageNode) -> None:
        sequence = make_sequence(num_tokens=PAGE)
        pool.enter(sequence, NO_MATCH)
        pool.advance(sequence)
        sequence.num_computed_tokens, sequence.tip = PAGE, node
        pool.publish(sequence)
        pool.leave(sequence)

    first, second = make_sequence(0, num_tokens=9), make_sequence(1, num_tokens=9)
    leave_snapshot(older)
    pool.enter(first, Match([older]))
    leave_snapshot(newer)
    pool.enter(second, NO_MATCH)
    pool.advance(second)
    pool.mark([Chunk(second.key, 1, 5, samples=False)], {second.key: second})
    assert older.state_row
    assert not newer.state_row


def test_snapshot_is_removed_with_its_page() -> None:
    first, second = make_sequence(0, num_tokens=20, max_tokens=1), make_sequence(1, num_tokens=20, max_tokens=1)
    engine = make_engine(**SHARES, num_pages=5)
    assert cached_tokens(engine, first, second) == [0, 0]
    again = make_sequence(2, num_tokens=20, max_tokens=1)
    again.tokens[:20] = first.tokens[:20]
    assert cached_tokens(engine, again) == [0]


def test_preempted_sequence_continues_from_its_last_snapshot() -> None:
    sequences = make_sequences(4, num_tokens=8, max_tokens=16)
    engine = make_engine(*sequences, **SHARES, num_pages=14)
    starts: dict[tuple[int, int], list[int]] = {}
    outputs: dict[tuple[int, int], list[int]] = {s.key: [] for s in sequences}
    while engine.has_work:
        step = engine.step()
        assert step is not None
        for key, num_cached in step.plan.starts:
            starts.setdefault(key, []).append(num_cached)
        for key, token in step.progress.by_key().items():
            outputs[key].append(token)
        engine.check()
    assert outputs == {s.key: expected_output(s) for s in sequences}
    again = [cached for all_of_one in starts.values() for cached in all_of_one[1:]]
    assert max(again, default=0) > 0


def test_samples_of_one_prompt_compute_it_once() -> None:
    sequences = make_group(0, 3, num_tokens=9, max_tokens=5, temperature=1.0)
    engine = make_engine(*sequences, **SHARES)
    assert run(engine) == {s.key: expected_output(s) for s in sequences}
    assert [s.num_cached_tokens for s in sequences] == [0, 8, 8]


def test_samples_of_a_prompt_too_short_to_share_do_not_wait() -> None:
    sequences = make_group(0, 3, num_tokens=PAGE, max_tokens=5, temperature=1.0)
    engine = make_engine(*sequences, **SHARES)
    plan = engine.plan()
    assert plan is not None
    assert len(plan.chunks) == 3


def test_recovered_sequence_recomputes_all_its_tokens() -> None:
    sequence = recover(make_sequence(0, num_tokens=5, max_tokens=9), 4)
    engine = make_engine(sequence, num_snapshots=0)
    assert run(engine) == {sequence.key: expected_output(sequence)}


@pytest.mark.parametrize("num_pages", [10, 64], ids=["preempted", "at ease"])
@pytest.mark.parametrize("options", [{"num_snapshots": 0}, SHARES], ids=["alone", "shared"])
def test_beams_continue_from_the_state_of_their_parent(num_pages: int, options: dict[str, Any]) -> None:
    clients = Clients(**options, num_pages=num_pages, max_num_seqs=6)
    clients.add_search(make_beams(0, 3, num_tokens=6, max_tokens=8))
    clients.add_search(make_beams(10, 2, num_tokens=7, max_tokens=6, speaker=3))
    clients.add(make_sequence(20, num_tokens=5, max_tokens=12))
    assert len(clients.live) == 6
    while clients.live:
        clients.step()
    assert (clients.engine.stats.num_preemptions > 0) == (num_pages == 10)


def test_exact_recomputation_has_no_additional_chunk_boundaries() -> None:
    first, second = sequences_with_common_prefix(0, 0, num_tokens=23)
    engine = make_engine(**SHARES, prefill_chunk=8, replays=True)
    assert cached_tokens(engine, first, second) == [0, 16]


class FailsLate(RecurrentHashRunner):
    """A step with the token 96 fails after all states were written."""

    def launch(self, inputs: StepInputs) -> None:
        super().launch(inputs)
        if 96 in inputs.token_ids.tolist():
            self._results.pop()
            raise ValueError("no 96")


@pytest.mark.parametrize("chunk", [2, 64])
def test_repeated_step_continues_from_the_states_before_it(chunk: int) -> None:
    sequences = make_sequences(4, num_tokens=6, max_tokens=12)
    sequences[2].tokens[4] = 96
    options: dict[str, Any] = {"num_snapshots": 0, "prefill_chunk": chunk}
    outputs = run(make_engine(*sequences, runner=FailsLate, **options))
    expected = {s.key: expected_output(s) for s in sequences}
    unaffected = [s for s in sequences if s is not sequences[2] and 96 not in expected[s.key]]
    assert len(unaffected) >= 2
    assert sequences[2].finish_reason == "error"
    assert all(outputs[s.key] == expected[s.key] for s in unaffected)
