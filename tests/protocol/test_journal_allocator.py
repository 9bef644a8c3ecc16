"""Extents of live records never overlap, in any order of accepts, frees and restarts."""

from __future__ import annotations

import itertools
import tempfile
from collections import deque
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.protocol.factories import TIMES, accept, make_journal, make_record
from triptych.protocol.errors import InvalidRequest, Overloaded
from triptych.protocol.journal.layout import DISPATCHED, FREE, extent
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import RequestView, RequestWriter, logprob_words, read_request
from triptych.protocol.journal.tokens import TokenWriter
from triptych.protocol.record import RequestRecord

NUM_RECORDS = 6
ARENA_BYTES = 4096
PICK = st.integers(0, NUM_RECORDS - 1)


class Allocator(RuleBasedStateMachine):
    """prepare and summarize on one journal, compared with a list of the live records."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.journal = make_journal(Path(self.folder.name), num_records=NUM_RECORDS, arena_bytes=ARENA_BYTES)
        self.writer = RequestWriter(self.journal)
        self.releases = ReleaseWriter(self.journal)
        self.live: dict[int, RequestView] = {}
        self.free = deque(range(NUM_RECORDS))
        self.generations = dict.fromkeys(range(NUM_RECORDS), 0)
        self.num_accepted = 0

    @rule(
        prompt=st.integers(0, 100), capacity=st.integers(1, 60), logprobs=st.none() | st.integers(0, 3)
    )  # fmt: skip
    def accept(self, prompt: int, capacity: int, logprobs: int | None) -> None:
        record = make_record(
            f"r{self.num_accepted}", num_prompt_tokens=prompt, token_capacity=capacity, logprobs=logprobs
        )  # fmt: skip
        size = extent(0, len(record.to_bytes()), capacity, logprob_words(logprobs)).end
        fits = bool(self.free) and any(end - start >= size for start, end in self.gaps())
        try:
            slot, generation = self.writer.accept(record, TIMES)
        except (Overloaded, InvalidRequest):
            assert not fits, f"{size} bytes were refused, the free gaps are {self.gaps()}"
            return
        assert fits
        assert (slot, generation) == (self.free.popleft(), self.generations[slot] + 1)
        view = read_request(self.journal, slot)
        assert view is not None
        assert (view.record, view.arrival) == (record, self.num_accepted)
        self.live[slot], self.generations[slot] = view, generation
        self.num_accepted += 1

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def dispatch(self, pick: int) -> None:
        view = self.pick(pick)
        self.writer.dispatch(view.slot, view.generation, 5)

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def release_only(self, pick: int) -> None:
        view = self.pick(pick)
        if not self.journal.release_states()[view.slot]:
            self.releases.release(view.slot, view.generation, num_tokens=0, reason="stop")
        assert not self.writer.recycle(view.slot, view.generation)

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def end(self, pick: int) -> None:
        self.free_record(self.pick(pick))

    @rule(slot=PICK)
    def a_late_forgotten_changes_nothing(self, slot: int) -> None:
        assert not self.writer.recycle(slot, self.generations[slot] - 1)

    @rule()
    def restart_prepare(self) -> None:
        self.writer = RequestWriter(self.journal)
        self.free = deque(sorted(self.free))  # a restart reads records by slot
        # The highest number still in the journal is all that a restart knows.
        self.num_accepted = max((view.arrival + 1 for view in self.live.values()), default=0)

    @invariant()
    def records_are_whole(self) -> None:
        for slot, view in self.live.items():
            read = read_request(self.journal, slot)
            assert read is not None
            assert (read.record, read.extent) == (view.record, view.extent)

    @invariant()
    def extents_do_not_overlap(self) -> None:
        extents = sorted((view.extent.payload_offset, view.extent.end) for view in self.live.values())
        borders = [0, *(border for pair in extents for border in pair), ARENA_BYTES]
        assert borders == sorted(borders)

    @invariant()
    def free_records_are_known(self) -> None:
        assert self.writer.num_free == len(self.free) == int((self.journal.states() == FREE).sum())

    def teardown(self) -> None:
        for view in list(self.live.values()):
            self.free_record(view)
        whole = make_record(num_prompt_tokens=0, token_capacity=1)
        room = (ARENA_BYTES - len(whole.to_bytes()) - 8) // 8
        self.writer.accept(make_record(num_prompt_tokens=0, token_capacity=room), TIMES)
        assert self.gaps_of_all() == [], "the arena is one free piece again"
        self.folder.cleanup()

    def pick(self, index: int) -> RequestView:
        return self.live[sorted(self.live)[index % len(self.live)]]

    def free_record(self, view: RequestView) -> None:
        self.releases.forget(view.slot, view.generation)
        if self.journal.states()[view.slot] == DISPATCHED:
            assert not self.writer.recycle(view.slot, view.generation), "execute may still write to it"
            TokenWriter(self.journal).finish(view.slot, view.generation, "abort")
        assert self.writer.recycle(view.slot, view.generation)
        del self.live[view.slot]
        self.free.append(view.slot)

    def gaps(self) -> list[tuple[int, int]]:
        return gaps_between([(v.extent.payload_offset, v.extent.end) for v in self.live.values()])

    def gaps_of_all(self) -> list[tuple[int, int]]:
        views = [view for slot in range(NUM_RECORDS) if (view := read_request(self.journal, slot)) is not None]
        return gaps_between([(v.extent.payload_offset, v.extent.end) for v in views])


def gaps_between(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    starts = [0, *(end for _, end in sorted(extents))]
    ends = [*(start for start, _ in sorted(extents)), ARENA_BYTES]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


NUM_PIECES, PIECE_BYTES = 4, 1024
FREED = [order for count in (2, 3) for order in itertools.permutations(range(NUM_PIECES), count)]


def record_of(num_pieces: int) -> RequestRecord:
    """A record whose extent has that many pieces of the arena."""
    fixed = len(make_record().to_bytes()) + 16
    return make_record(token_capacity=(num_pieces * PIECE_BYTES - fixed) // 8)


@pytest.mark.parametrize("freed", FREED, ids=str)
def test_freed_pieces_are_merged_with_their_neighbours_only(tmp_path: Path, freed: tuple[int, ...]) -> None:
    journal = make_journal(tmp_path, num_records=NUM_PIECES + 1, arena_bytes=NUM_PIECES * PIECE_BYTES)
    writer = RequestWriter(journal)
    views = [accept(writer, journal, record_of(1)) for _ in range(NUM_PIECES)]
    for index in freed:
        ReleaseWriter(journal).forget(*views[index].key)
        assert writer.recycle(*views[index].key)
    kept = [view for view in views if view.slot not in freed]
    longest = max(sum(1 for _ in run) for is_free, run in itertools.groupby(range(4), freed.__contains__) if is_free)
    with pytest.raises((Overloaded, InvalidRequest)):
        writer.accept(record_of(longest + 1), TIMES)
    writer.accept(record_of(longest), TIMES)
    assert [read_request(journal, view.slot) for view in kept] == kept


def test_group_that_does_not_fit_gives_back_what_its_first_records_took(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, arena_bytes=NUM_PIECES * PIECE_BYTES)
    writer = RequestWriter(journal)
    writer.accept(record_of(1), TIMES)
    with pytest.raises(Overloaded):
        writer.accept_all([record_of(2), record_of(2)], TIMES)
    writer.accept(record_of(NUM_PIECES - 1), TIMES)
