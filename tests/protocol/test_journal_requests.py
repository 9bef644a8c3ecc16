"""prepare's part: a request is visible once it is published, until summarize has forgotten it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.protocol.factories import TIMES, accept, make_journal, make_record
from triptych.protocol.errors import InvalidRequest, JournalError, Overloaded
from triptych.protocol.journal.layout import ACCEPTED, DISPATCHED, Journal
from triptych.protocol.journal.releases import ReleaseWriter, is_released, read_release
from triptych.protocol.journal.requests import RequestView, RequestWriter, _Extents, logprob_words, read_request
from triptych.protocol.journal.tokens import TokenWriter
from triptych.protocol.record import mark_of


def forget(journal: Journal, view: RequestView) -> None:
    releases = ReleaseWriter(journal)
    releases.release(view.slot, view.generation, num_tokens=0, reason="abort")
    releases.forget(view.slot, view.generation)


def test_accepted_request_is_read_back(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    record = make_record("a", logprobs=2, temperature=0.5)
    view = accept(RequestWriter(journal), journal, record)
    assert (view.slot, view.generation, view.state, view.arrival) == (0, 1, ACCEPTED, 0)
    assert (view.record, view.accepted_ns) == (record, TIMES.accepted_ns)


def test_arrivals_are_numbered_in_order(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    assert [accept(writer, journal).arrival for _ in range(3)] == [0, 1, 2]


def test_numbering_continues_after_a_restart(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    accept(RequestWriter(journal), journal)
    assert accept(RequestWriter(journal), journal).arrival == 1


def test_dispatching_changes_the_state(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    view = accept(writer, journal)
    writer.dispatch(view.slot, view.generation, 5)
    again = read_request(journal, view.slot)
    assert again is not None
    assert again == replace(view, state=DISPATCHED)
    assert journal.records["dispatched_ns"][view.slot] == 5


def test_full_journal_refuses_and_stays_unchanged(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, num_records=1)
    writer = RequestWriter(journal)
    view = accept(writer, journal)
    with pytest.raises(Overloaded, match="needs 1 records of the journal, 0 of 1 are free"):
        writer.accept(make_record("b"), TIMES)
    assert read_request(journal, 0) == view


def fill(writer: RequestWriter) -> None:
    for index in range(4):
        writer.accept(make_record(f"r{index}", token_capacity=200), TIMES)


def test_full_arena_refuses_and_stays_unchanged(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, arena_bytes=1 << 12)
    writer = RequestWriter(journal)
    with pytest.raises(Overloaded, match=r"needs \d+ bytes of the journal, fewer of its 4096 are free"):
        fill(writer)
    before = writer.num_free
    with pytest.raises(Overloaded):
        fill(writer)
    assert 0 < writer.num_free == before < 4


def test_request_larger_than_the_journal_is_refused_with_both_sizes(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, arena_bytes=1 << 12)
    writer = RequestWriter(journal)
    with pytest.raises(InvalidRequest, match=r"needs \d+ bytes of the journal, which has 4096"):
        writer.accept(make_record(token_capacity=1024), TIMES)
    assert writer.num_free == 4


def test_forgotten_record_is_reused(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, num_records=1)
    writer = RequestWriter(journal)
    first = accept(writer, journal)
    forget(journal, first)
    assert writer.recycle(first.slot, first.generation)
    assert accept(writer, journal, make_record("b")).generation == first.generation + 1


def test_released_record_is_kept_until_it_is_forgotten(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    view = accept(writer, journal)
    ReleaseWriter(journal).release(view.slot, view.generation, num_tokens=0, reason="abort")
    assert not writer.recycle(view.slot, view.generation)
    assert read_request(journal, view.slot) == view


def test_record_that_execute_may_still_write_to_is_kept(tmp_path: Path) -> None:
    """A step in flight would otherwise write its token into the prompt of the next owner of these bytes."""
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    view = accept(writer, journal)
    writer.dispatch(view.slot, view.generation, 5)
    forget(journal, view)
    assert not writer.recycle(view.slot, view.generation)
    TokenWriter(journal).finish(view.slot, view.generation, "abort")
    assert writer.recycle(view.slot, view.generation)


def test_recycling_twice_frees_once(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    view = accept(writer, journal)
    forget(journal, view)
    assert [writer.recycle(view.slot, view.generation) for _ in range(2)] == [True, False]
    assert writer.num_free == 4


def test_late_forgotten_message_of_an_earlier_request_frees_nothing(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, num_records=1)
    writer = RequestWriter(journal)
    first = accept(writer, journal)
    forget(journal, first)
    writer.recycle(first.slot, first.generation)
    second = accept(writer, journal)
    assert not writer.recycle(first.slot, first.generation)
    assert read_request(journal, 0) == second


def test_record_that_was_free_longest_is_reused_first(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, num_records=3)
    writer = RequestWriter(journal)
    views = [accept(writer, journal) for _ in range(3)]
    for slot in (2, 0, 1):
        forget(journal, views[slot])
        writer.recycle(slot, 1)
    assert [accept(writer, journal).slot for _ in range(3)] == [2, 0, 1]


def test_ids_of_free_records_are_known_after_a_restart(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    view = accept(writer, journal, replace(make_record("old", digest=99), owner=2**63))
    accept(writer, journal, make_record("live"))
    forget(journal, view)
    writer.recycle(view.slot, view.generation)
    assert RequestWriter(journal).past_ids() == [("old", mark_of(99, 2**63))]


def test_id_whose_answer_was_not_read_counts_as_never_used(tmp_path: Path) -> None:
    """Its client may not know that the request was accepted, and submits it again."""
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    view = accept(writer, journal, make_record("unread"))
    ReleaseWriter(journal).release(view.slot, view.generation, num_tokens=0, reason="abort")
    ReleaseWriter(journal).give_up(view.slot, view.generation)
    assert writer.recycle(view.slot, view.generation)
    assert RequestWriter(journal).past_ids() == []


def test_generations_skip_zero_when_they_wrap(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, num_records=1)
    journal.prepare_words[0] = (2**32 - 1) << 32
    assert accept(RequestWriter(journal), journal).generation == 1


@pytest.mark.parametrize(("alternatives", "words"), [(None, 0), (0, 1), (20, 41)])
def test_logprobs_take_their_space(alternatives: int | None, words: int) -> None:
    assert logprob_words(alternatives) == words


@pytest.mark.parametrize(
    "field", ["payload_offset", "payload_bytes", "crc", "token_capacity", "logprob_words", "arrival", "accepted_ns"]
)
def test_damaged_field_is_detected(tmp_path: Path, field: str) -> None:
    journal = make_journal(tmp_path)
    view = accept(RequestWriter(journal), journal)
    journal.records[field][view.slot] += 1
    with pytest.raises(JournalError, match="checksum"):
        read_request(journal, view.slot)


def test_damaged_prompt_is_detected(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    view = accept(RequestWriter(journal), journal)
    journal.arena[view.extent.payload_offset + 5] ^= 1
    with pytest.raises(JournalError, match="checksum"):
        read_request(journal, view.slot)


def test_damaged_record_is_given_up_at_a_restart(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, num_records=1)
    accept(RequestWriter(journal), journal)
    journal.records["crc"][0] ^= 1
    writer = RequestWriter(journal)
    assert (writer.num_free, read_request(journal, 0)) == (1, None)
    assert accept(writer, journal).generation == 2


def test_records_that_share_bytes_are_refused_at_a_restart(tmp_path: Path) -> None:
    """Both checksums are valid, so another program must have written the file."""
    journal = make_journal(tmp_path)
    accept(RequestWriter(journal), journal)
    journal.records[1] = journal.records[0]
    with pytest.raises(JournalError, match="share the bytes"):
        RequestWriter(journal)


def test_records_that_share_a_full_arena_are_refused_at_a_restart(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, arena_bytes=192)
    accept(RequestWriter(journal), journal)
    journal.records[1] = journal.records[0]
    with pytest.raises(JournalError, match="share the bytes"):
        RequestWriter(journal)


def test_range_that_begins_free_and_ends_in_use_is_refused() -> None:
    arena = _Extents(256)
    arena.take(64, 128)
    with pytest.raises(JournalError, match="share the bytes 0 to 128"):
        arena.take(0, 128)


class Interrupted(Journal):
    """A journal that changes while a reader copies the request."""

    def __init__(self, journal: Journal, event: Any) -> None:
        self.__dict__.update(vars(journal))
        self._arena, self._event = self.__dict__.pop("arena"), event

    @property
    def arena(self) -> Any:  # type: ignore[override]
        self._event()
        return self._arena


def test_request_dispatched_during_the_read_is_read(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    view = accept(writer, journal)
    reader = Interrupted(journal, lambda: writer.dispatch(view.slot, view.generation, 5))
    read = read_request(reader, view.slot)
    assert read is not None
    assert read.record == view.record


@pytest.mark.parametrize("reused", [False, True])
def test_request_freed_during_the_read_reads_as_none(tmp_path: Path, reused: bool) -> None:
    journal = make_journal(tmp_path, num_records=1)
    writer = RequestWriter(journal)
    view = accept(writer, journal)

    def free() -> None:
        forget(journal, view)
        if writer.recycle(view.slot, view.generation) and reused:
            writer.accept(make_record("b", num_prompt_tokens=9), TIMES)

    assert read_request(Interrupted(journal, free), view.slot) is None


def test_request_has_not_ended_until_it_is_released(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    view = accept(RequestWriter(journal), journal)
    assert read_release(journal, view.slot, view.generation) is None
    assert not is_released(journal, view.slot, view.generation)


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_end_is_read_back_before_and_after_it_is_forgotten(tmp_path: Path, reason: str) -> None:
    journal = make_journal(tmp_path)
    view = accept(RequestWriter(journal), journal)
    key = view.slot, view.generation
    releases = ReleaseWriter(journal)
    releases.release(*key, num_tokens=5, reason=reason)
    assert (read_release(journal, *key), is_released(journal, *key)) == ((5, reason), True)
    releases.forget(*key)
    assert (read_release(journal, *key), is_released(journal, *key)) == ((5, reason), True)


def test_end_of_an_earlier_request_is_ignored(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, num_records=1)
    writer = RequestWriter(journal)
    first = accept(writer, journal)
    forget(journal, first)
    writer.recycle(first.slot, first.generation)
    second = accept(writer, journal)
    assert read_release(journal, second.slot, second.generation) is None
    assert journal.release_states().tolist() == [0]


def test_scans_show_the_current_state_of_every_slot(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    views = [accept(writer, journal) for _ in range(3)]
    writer.dispatch(views[1].slot, views[1].generation, 5)
    ReleaseWriter(journal).release(views[1].slot, views[1].generation, num_tokens=0, reason="stop")
    forget(journal, views[2])
    assert journal.states().tolist() == [ACCEPTED, DISPATCHED, ACCEPTED, 0]
    assert journal.release_states().tolist() == [0, 1, 2, 0]
    assert journal.generations().tolist() == [1, 1, 1, 0]
    assert journal.generations().dtype == np.uint64


def test_writer_returns_found_requests_once_in_order_of_arrival(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, num_records=2)
    writer = RequestWriter(journal)
    first, _ = accept(writer, journal, make_record("a")), accept(writer, journal, make_record("b"))
    forget(journal, first)
    assert writer.recycle(first.slot, first.generation)
    accept(writer, journal, make_record("c"))
    later = RequestWriter(journal)
    assert [view.record.request_id for view in later.take_found()] == ["b", "c"]
    assert later.take_found() == []
