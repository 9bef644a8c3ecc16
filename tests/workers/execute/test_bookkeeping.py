"""What execute writes to the journal about a step, and what it must not."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.protocol.factories import TIMES, accept, make_journal, make_record
from tests.workers.execute.factories import make_engine
from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.requests import RequestView, RequestWriter, read_request
from triptych.protocol.journal.tokens import TokenWriter, read_finish, read_logprobs, read_times, read_tokens
from triptych.protocol.record import RequestRecord
from triptych.workers.execute.bookkeeping import NO_TOKEN, Bookkeeper
from triptych.workers.execute.engine import Engine, StepOutputs
from triptych.workers.execute.scheduling.sequence import Sequence


def test_nothing_is_written_for_a_sequence_released_since_the_step_was_planned(tmp_path: Path) -> None:
    """Its record may belong to another request: neither its schedule time nor its end may be written."""
    journal = make_journal(tmp_path)
    writer, books, engine = RequestWriter(journal), Bookkeeper(journal, eos_token_ids=frozenset()), make_engine()
    views = [accept(writer, journal, make_record(name, digest=digest)) for digest, name in enumerate("abc")]
    for view in views:
        writer.dispatch(view.slot, view.generation, 5)
        engine.add(books.adopt(view))
    gone, expired, there = ((view.slot, view.generation) for view in views)
    plan = engine.plan()
    assert plan is not None
    engine.launch(plan)
    for key in (gone, expired):
        engine.release(key)
        books.drop(key)
    outputs = engine.collect()
    assert {start.key for start in plan.starts} == {gone, expired, there}
    outputs.progress.expired[expired] = "its deadline has passed"
    books.record(outputs)
    [rows] = books.take_rows()
    assert journal.records["scheduled_ns"][[gone[0], expired[0]]].tolist() == [0, 0]
    assert journal.records["scheduled_ns"][there[0]] == outputs.launched_at
    assert [read_finish(journal, *key) for key in (gone, expired)] == [("abort", "")] * 2
    assert rows.slots.tolist() == [there[0]]


def test_steps_with_only_tokens_are_written_together(tmp_path: Path) -> None:
    journal, clock = make_journal(tmp_path), itertools.count(10**9, 10**6)
    books = Bookkeeper(journal, eos_token_ids=frozenset())
    views = dispatched(journal, [make_record(name) for name in "ab"])
    engine = make_engine(*map(books.adopt, views), clock=lambda: next(clock))
    steps = [next_step(engine) for _ in range(5)]
    for step in steps:
        books.record(step)
    assert books.num_unwritten == 4
    assert [len(tokens_of(journal, view)) for view in views] == [1, 1], "a step with a prompt is written at once"
    rows = books.take_rows()
    assert books.num_unwritten == 0
    for row, view in enumerate(views):
        tokens = [step.progress.token_ids[row] for step in steps]
        assert tokens_of(journal, view) == tokens
        assert read_times(journal, view, 5).tokens_ns.tolist() == [step.collected_at for step in steps]
        received = [zip(part.slots, part.indices, part.token_ids, strict=True) for part in rows]
        assert [(i, t) for part in received for slot, i, t in part if slot == view.slot] == list(enumerate(tokens))


def test_of_steps_that_are_written_together_only_tokens_are_kept(tmp_path: Path) -> None:
    """Whole outputs of a hundred steps are objects that each search for garbage visits."""
    journal = make_journal(tmp_path)
    engine, books = make_engine(), Bookkeeper(journal, eos_token_ids=frozenset())
    [view] = dispatched(journal, [make_record()])
    engine.add(books.adopt(view))
    for _ in range(4):
        books.record(outputs := next_step(engine))
    assert books.num_unwritten == 3
    assert not any(isinstance(holder, (list, tuple)) for holder in gc.get_referrers(outputs))


def test_logprobs_are_written_with_their_tokens(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    view, other = dispatched(journal, [make_record("a", logprobs=2), make_record("b")])
    books = Bookkeeper(journal, eos_token_ids=frozenset())
    engine = make_engine(books.adopt(view), books.adopt(other))
    for _ in range(3):
        books.record(next_step(engine))
    rows: list[Any] = read_logprobs(journal, view, 0, 3)
    for (chosen, alternatives), token_id in zip(rows, tokens_of(journal, view), strict=True):
        assert len(alternatives) == 2
        assert alternatives[0] == [token_id, chosen]
        assert 0 > chosen > alternatives[1][1]


def test_pending_tokens_are_written_before_an_end(tmp_path: Path) -> None:
    """After it the record may belong to another request."""
    journal = make_journal(tmp_path)
    books = Bookkeeper(journal, eos_token_ids=frozenset())
    view, other = dispatched(journal, [make_record("a"), make_record("b")])
    engine = make_engine(books.adopt(view), books.adopt(other))
    for _ in range(3):
        books.record(next_step(engine))
    key = view.slot, view.generation
    engine.release(key)
    books.drop(key)
    assert [len(tokens_of(journal, each)) for each in (view, other)] == [3, 3]
    assert read_finish(journal, *key) == ("abort", "")
    books.record(next_step(engine))
    assert books.num_unwritten == 1
    books.take_rows()
    assert [len(tokens_of(journal, each)) for each in (view, other)] == [3, 4]


def next_step(engine: Engine) -> StepOutputs:
    outputs = engine.step()
    assert outputs is not None
    return outputs


def tokens_of(journal: Journal, view: RequestView) -> list[int]:
    tokens = read_tokens(journal, view)
    assert tokens is not None
    return [int(token) for token in tokens]


def test_after_a_crash_a_request_counts_as_started_with_its_first_sequence(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    writer, deadline_at = RequestWriter(journal), 9_000_000
    records = [replace(make_record(f"a {i}", n=2), index=i, queue_deadline_at=deadline_at) for i in range(2)]
    views = [view for slot, _ in writer.accept_all(records, TIMES) if (view := read_request(journal, slot))]
    assert [adopted(journal, view).queue_deadline_at for view in views] == [deadline_at] * 2
    TokenWriter(journal).add_times(views[0].slot, scheduled_ns=6_000_000)
    assert [adopted(journal, view).queue_deadline_at for view in views] == [0, 0]


def adopted(journal: Journal, view: RequestView) -> Sequence:
    """The request's sequence in a restarted execute."""
    return Bookkeeper(journal, eos_token_ids=frozenset()).adopt(view)


@pytest.mark.parametrize("host_pages", [0, 40], ids=["from the prompt", "swapped"])
def test_preempted_search_counts_as_preempted_until_its_next_step(tmp_path: Path, host_pages: int) -> None:
    journal, clock = make_journal(tmp_path), itertools.count(10**9)
    books = Bookkeeper(journal, eos_token_ids=frozenset())
    engine = make_engine(num_pages=18, host_pages=host_pages, prefill_chunk=64, clock=lambda: next(clock))
    earlier = make_record(num_prompt_tokens=30, token_capacity=30)
    beams = [replace(make_record(f"b {i}", num_beams=3, token_capacity=20), index=i) for i in range(3)]
    for view in [*dispatched(journal, [earlier]), *(search := dispatched(journal, beams))]:
        engine.add(books.adopt(view))
    preempted_ns = since_ns = 0
    while (outputs := engine.step()) is not None:
        books.record(outputs)
        if outputs.plan.preempted:
            since_ns = since_ns or outputs.launched_at
        elif since_ns and outputs.progress.choices:
            preempted_ns, since_ns = preempted_ns + outputs.collected_at - since_ns, 0
    assert engine.stats.num_preemptions >= 3
    for view in search:
        times = read_times(journal, view, 0)
        assert times.preempted_ns == preempted_ns
        assert times.lost_early_ns == (0 if host_pages else preempted_ns)


def test_search_restarted_twice_counts_its_lost_time_once(tmp_path: Path) -> None:
    journal, clock = make_journal(tmp_path), itertools.count(10**9)
    beams = [replace(make_record(f"b {i}", num_beams=2, token_capacity=20), index=i) for i in range(2)]
    search = dispatched(journal, beams)
    for _ in range(3):
        books = Bookkeeper(journal, eos_token_ids=frozenset())
        engine = make_engine(*map(books.adopt, search), clock=lambda: next(clock))
        steps = [step for _ in range(3) if (step := engine.step()) is not None]
        for step in steps:
            books.record(step)
    for view in search:
        times = read_times(journal, view, 0)
        assert times.scheduled_ns + times.recovered_ns == steps[0].collected_at
        assert times.lost_early_ns == times.recovered_ns


@pytest.mark.parametrize("num_steps", [1, 3], ids=["in its prompt", "while it decodes"])
def test_time_lost_to_a_crash_before_the_first_token_is_recorded_as_such(tmp_path: Path, num_steps: int) -> None:
    journal, clock = make_journal(tmp_path), itertools.count(10**9)
    [view] = dispatched(journal, [make_record(num_prompt_tokens=12)])
    for count in (num_steps, 3):
        books = Bookkeeper(journal, eos_token_ids=frozenset())
        engine = make_engine(books.adopt(view), clock=lambda: next(clock))
        for _ in range(count):
            outputs = engine.step()
            assert outputs is not None
            books.record(outputs)
    times = read_times(journal, view, 0)
    assert times.recovered_ns > 0
    assert times.lost_early_ns == (times.recovered_ns if num_steps == 1 else 0)


def test_loss_in_progress_is_known_of_a_request_that_ends_during_it(tmp_path: Path) -> None:
    journal, clock = make_journal(tmp_path), itertools.count(10**9)
    books = Bookkeeper(journal, eos_token_ids=frozenset())
    engine = make_engine(num_pages=8, prefill_chunk=64, clock=lambda: next(clock))
    views = dispatched(journal, [make_record(f"{i}", num_prompt_tokens=12, token_capacity=20) for i in range(2)])
    for view in views:
        engine.add(books.adopt(view))
    while (outputs := engine.step()) is not None:
        books.record(outputs)
        if outputs.plan.preempted:
            break
    assert outputs is not None
    [(slot, generation)], since_ns = outputs.plan.preempted, outputs.launched_at
    view = next(view for view in views if view.slot == slot)
    assert read_times(journal, view, 1).until(since_ns + 70).preempted_ns == 70
    books.drop((slot, generation))
    assert read_times(journal, view, 1).until(since_ns + 90).preempted_ns == 90
    sequence = adopted(journal, view)
    times = read_times(journal, view, sequence.num_output_tokens)
    assert times.until(int(times.tokens_ns[-1]) + 50)[2:5] == (0, 50, 0)


def test_torn_time_of_an_earlier_process_has_no_effect(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    [view] = dispatched(journal, [make_record()])
    adopted(journal, view)
    journal.records["scheduled_ns"][view.slot] = 2**62
    books = Bookkeeper(journal, eos_token_ids=frozenset())
    outputs = make_engine(books.adopt(view)).step()
    assert outputs is not None
    books.record(outputs)
    assert len(books.take_rows()) == 1
    assert read_times(journal, view, 0).recovered_ns == 0


def test_cuts_of_a_prompt_are_known_after_a_crash(tmp_path: Path) -> None:
    """A prompt that is cut elsewhere may give other tokens."""
    journal = make_journal(tmp_path)
    [view] = dispatched(journal, [make_record(num_prompt_tokens=11)])
    books = Bookkeeper(journal, eos_token_ids=frozenset())
    engine = make_engine(sequence := books.adopt(view), prefill_chunk=4, replays=True)
    while not sequence.num_output_tokens:
        books.record(next_step(engine))
    assert adopted(journal, view).chunk_ends == sequence.chunk_ends == [4, 8, 11]


def test_limits_and_ends_of_a_request_are_those_of_its_sequence(tmp_path: Path) -> None:
    journal, times = make_journal(tmp_path), {"deadline_at": 9_000_000, "queue_deadline_at": 8_000_000}
    fields: dict[str, Any] = {**times, "priority": 3, "grammar": "start: /x/"}
    [view] = dispatched(journal, [replace(make_record(stop_token_ids=[5]), **fields)])
    sequence = Bookkeeper(journal, eos_token_ids=frozenset([2])).adopt(view)
    assert (sequence.deadline_at, sequence.queue_deadline_at, sequence.priority) == (9_000_000, 8_000_000, 3)
    assert (sequence.stop_ids, sequence.final_ids) == (frozenset([2, 5]), frozenset([2]))


def test_end_that_was_written_is_not_changed_when_its_request_is_dropped(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    [view] = dispatched(journal, [make_record()])
    books = Bookkeeper(journal, eos_token_ids=frozenset())
    books.adopt(view)
    books.fail(view.key, "why")
    books.drop(view.key)
    assert read_finish(journal, *view.key) == ("error", "model_failed\nwhy")


def test_ends_without_a_token_follow_the_tokens_of_their_step(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    views = dispatched(journal, [make_record(name) for name in "abc"])
    books = Bookkeeper(journal, eos_token_ids=frozenset())
    engine = make_engine(*map(books.adopt, views))
    books.record(next_step(engine))
    books.take_rows()
    engine.release(views[1].key)
    outputs = next_step(engine)
    outputs.progress.expired[views[1].key] = "its deadline has passed"
    books.record(outputs)
    [rows] = books.take_rows()
    assert rows.slots.tolist() == [views[0].slot, views[2].slot, views[1].slot]
    assert rows.indices.tolist() == [1, 1, NO_TOKEN]
    assert [bool(reason) for reason in rows.reasons] == [False, False, True]


def dispatched(journal: Journal, records: list[RequestRecord]) -> list[RequestView]:
    writer = RequestWriter(journal)
    keys = writer.accept_all(records, TIMES)
    for key in keys:
        writer.dispatch(*key, 5)
    return [view for slot, _ in keys if (view := read_request(journal, slot)) is not None]
