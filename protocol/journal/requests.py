"""prepare's part of the journal: records are created, dispatched and recycled; any process may read them."""

from __future__ import annotations

import bisect
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidRequest, JournalError, Overloaded
from ..record import RequestRecord, mark_of
from ..record_key import Key
from .layout import ACCEPTED, DISPATCHED, FREE, UNREAD, Extent, Journal, extent, split_word, word
from .releases import is_forgotten, release_state


@dataclass(frozen=True, slots=True)
class AcceptTimes:
    """Times of the journal's clock (``Journal.now_ns``), nanoseconds."""

    received_ns: int
    tokenize_start_ns: int
    tokenize_end_ns: int
    accepted_ns: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """A record read back and verified."""

    slot: int
    generation: int
    state: int  # ACCEPTED or DISPATCHED
    arrival: int
    accepted_ns: int
    extent: Extent
    record: RequestRecord
    group: Key  # of the last record of this request; of a single one, its own

    @property
    def key(self) -> Key:
        return self.slot, self.generation


def logprob_words(num_alternatives: int | None) -> int:
    """Four-byte words of logprobs per token: the chosen one's, then id and logprob of each alternative."""
    return 0 if num_alternatives is None else 1 + 2 * num_alternatives


def read_request(journal: Journal, slot: int) -> RequestView | None:
    """The request in a slot; None if there is none (free, or being written).

    The records of a request with several sequences count only once the last one is published.

    Raises:
        JournalError: the record is published but its checksum does not match.
    """
    entry = journal.records[slot]
    generation, state = split_word(entry["prepare_word"])
    if state == FREE:
        return None
    offset, size = int(entry["payload_offset"]), int(entry["payload_bytes"])
    capacity, words, scores = (int(entry[name]) for name in ("token_capacity", "logprob_words", "score_words"))
    arrival, accepted_ns, expected = int(entry["arrival"]), int(entry["accepted_ns"]), int(entry["crc"])
    group = int(entry["last_slot"]), int(entry["last_generation"])
    payload = journal.arena[offset : offset + size].tobytes()
    current, state = split_word(entry["prepare_word"])
    if current != generation or state == FREE:
        return None  # freed or reused meanwhile
    if _crc(payload, generation, offset, capacity, words, scores, arrival, accepted_ns, *group) != expected:
        raise JournalError(f"journal record {slot}: checksum does not match")
    if not _is_published(journal, *group):
        return None
    record = RequestRecord.from_bytes(payload)
    where = extent(offset, size, capacity, words, scores)
    return RequestView(slot, generation, state, arrival, accepted_ns, where, record, group)


def _is_published(journal: Journal, slot: int, generation: int) -> bool:
    """Whether this record was ever published. Generations are used in order, so it may be long gone."""
    return (journal.generation(slot) - generation) & 0xFFFFFFFF < 1 << 31


def slots_of_group(journal: Journal, group: Key) -> list[int]:
    """The records of one request, in order of arrival; ``group`` is the ``RequestView.group`` of any of them."""
    records = journal.records
    is_member = (records["last_slot"] == group[0]) & (records["last_generation"] == group[1])
    slots: list[int] = np.flatnonzero(is_member & (journal.states() != FREE)).tolist()
    return sorted(slots, key=lambda slot: int(records["arrival"][slot]))


def drop(journal: Journal, slot: int) -> None:
    """Free a damaged record, or one of a request whose last record was never published.

    Its client either was not told that the request was accepted, or will be told that the id is unknown. It may send
    the request again, so the id must not count as answered.
    """
    entry = journal.records[slot]
    entry["id_generation"] = 0
    entry["prepare_word"] = word(journal.generation(slot), FREE)


def _crc(payload: bytes, *numbers: int) -> int:
    return zlib.crc32(struct.pack(f"<{len(numbers)}Q", *numbers), zlib.crc32(payload))


class RequestWriter:
    """Allocates records and publishes requests. One per journal, in prepare.

    Invariant: the extents of allocated records do not overlap. The free list is derived from the records, so a
    restarted prepare rebuilds it.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._arena = _Extents(journal.arena_bytes)
        self._free: deque[int] = deque()  # longest free first: keeps a freed record's id as long as possible
        self._next_arrival = 0
        self._found: list[RequestView] = []
        for slot in range(journal.num_records):
            view = self._read_or_drop(slot)
            if view is None:
                self._free.append(slot)
            else:
                self._found.append(view)
                self._arena.take(view.extent.payload_offset, view.extent.end)
                self._next_arrival = max(self._next_arrival, view.arrival + 1)

    def take_found(self) -> list[RequestView]:
        """What the journal held when this writer was created, in order of arrival. Once only: it is not kept."""
        found, self._found = self._found, []
        return sorted(found, key=lambda view: view.arrival)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def past_ids(self) -> list[tuple[str, int]]:
        """Id and mark (see ``mark_of``) of free records whose answers clients have received."""
        entries = (self._journal.records[slot] for slot in self._free)
        # An id whose generation was never published belongs to a request that prepare was writing when it was killed.
        written = [e for e in entries if e["request_id"] and e["id_generation"] == split_word(e["prepare_word"])[0]]
        answered = [e for e in written if release_state(e["release_word"], int(e["id_generation"])) != UNREAD]
        # A damaged id does not decode; replaced characters match no request.
        ids = (bytes(entry["request_id"]).decode(errors="replace") for entry in answered)
        return list(zip(ids, (mark_of(int(e["digest"]), int(e["owner"])) for e in answered), strict=True))

    def accept(self, record: RequestRecord, times: AcceptTimes) -> Key:
        """Publish a request with one record, see ``accept_all``."""
        [key] = self.accept_all([record], times)
        return key

    def accept_all(self, records: Sequence[RequestRecord], times: AcceptTimes) -> list[Key]:
        """Publish the records of a request as ACCEPTED; returns their keys. From here on it will be answered.

        They become visible together with the last one, to readers and after a crash.

        Raises:
            Overloaded: too few records or arena bytes are free; nothing was written.
            InvalidRequest: the whole journal is too small; nothing was written.
        """
        if len(records) > self._journal.num_records:
            raise InvalidRequest(
                f"the request needs {len(records)} records, the journal has {self._journal.num_records} (--max-records)"
            )
        if len(records) > len(self._free):
            raise Overloaded(
                f"the request needs {len(records)} records of the journal, {len(self._free)} of"
                f" {self._journal.num_records} are free (--max-records)"
            )
        payloads = [record.to_bytes() for record in records]
        offsets = self._place(records, payloads)
        slots = [self._free.popleft() for _ in records]
        last = slots[-1], self._next_generation(slots[-1])
        parts = zip(slots, offsets, payloads, records, strict=True)
        return [(slot, self._write(slot, at, payload, record, times, last)) for slot, at, payload, record in parts]

    def _place(self, records: Sequence[RequestRecord], payloads: list[bytes]) -> list[int]:
        """The arena offset of each record."""
        words = [(r.token_capacity, logprob_words(r.num_logprobs), r.num_prompt_words) for r in records]
        sizes = [extent(0, len(payload), *each).end for payload, each in zip(payloads, words, strict=True)]
        if sum(sizes) > self._journal.arena_bytes:
            raise InvalidRequest(
                f"the request needs {sum(sizes)} bytes of the journal, which has {self._journal.arena_bytes}"
                " (--arena-bytes)"
            )
        offsets: list[int] = []
        for size in sizes:
            if (offset := self._arena.allocate(size)) is None:
                for given, its_size in zip(offsets, sizes, strict=False):
                    self._arena.give(given, given + its_size)
                raise Overloaded(
                    f"the request needs {sum(sizes)} bytes of the journal,"
                    f" fewer of its {self._journal.arena_bytes} are free (--arena-bytes)"
                )
            offsets.append(offset)
        return offsets

    def _next_generation(self, slot: int) -> int:
        return (self._journal.generation(slot) + 1) & 0xFFFFFFFF or 1

    def _write(
        self, slot: int, offset: int, payload: bytes, record: RequestRecord, times: AcceptTimes, last: Key
    ) -> int:
        entry, words = self._journal.records[slot], logprob_words(record.num_logprobs)
        generation = self._next_generation(slot)
        self._journal.arena[offset : offset + len(payload)] = memoryview(payload)
        entry["payload_offset"], entry["payload_bytes"] = offset, len(payload)
        entry["token_capacity"], entry["logprob_words"] = record.token_capacity, words
        entry["score_words"] = scores = record.num_prompt_words
        entry["arrival"] = self._next_arrival
        entry["received_ns"], entry["accepted_ns"] = times.received_ns, times.accepted_ns
        entry["tokenize_start_ns"], entry["tokenize_end_ns"] = times.tokenize_start_ns, times.tokenize_end_ns
        entry["dispatched_ns"] = entry["told_ns"] = 0
        entry["last_slot"], entry["last_generation"] = last
        entry["id_generation"] = generation
        entry["request_id"] = record.request_id.encode()
        entry["digest"], entry["owner"] = record.digest, record.owner
        sizes = record.token_capacity, words, scores
        entry["crc"] = _crc(payload, generation, offset, *sizes, self._next_arrival, times.accepted_ns, *last)
        entry["prepare_word"] = word(generation, ACCEPTED)
        self._next_arrival += 1
        return generation

    def dispatch(self, slot: int, generation: int, now_ns: int) -> None:
        """Mark the request as handed to execute, which may start it from here on, even if the message is lost."""
        entry = self._journal.records[slot]
        entry["dispatched_ns"] = now_ns
        entry["prepare_word"] = word(generation, DISPATCHED)

    def note_told(self, slot: int, now_ns: int) -> None:
        """The client of this request asked again, and is sent ACCEPTED again."""
        self._journal.records["told_ns"][slot] = now_ns

    def recycle(self, slot: int, generation: int) -> bool:
        """Free the record once summarize has released it for good and execute has finished with it; False if not, or
        if that generation is already gone.
        """
        entry = self._journal.records[slot]
        current, state = split_word(entry["prepare_word"])
        if current != generation or state == FREE or not is_forgotten(self._journal, slot, generation):
            return False
        # NOTE: until execute has published that no token follows, a step in flight may still write one into the
        # extent, which would then belong to another request.
        if state == DISPATCHED and split_word(entry["finish_word"])[0] != generation:
            return False
        offset, size = int(entry["payload_offset"]), int(entry["payload_bytes"])
        words = (int(entry[name]) for name in ("token_capacity", "logprob_words", "score_words"))
        end = extent(offset, size, *words).end
        entry["prepare_word"] = word(generation, FREE)
        self._arena.give(offset, end)
        self._free.append(slot)
        return True

    def _read_or_drop(self, slot: int) -> RequestView | None:
        try:
            view = read_request(self._journal, slot)
        except JournalError:
            # A killed process cannot leave this state (the word is stored last): the file was damaged. Nothing in this
            # record can be trusted, so it is dropped; for its client the id is then unknown.
            view = None
        if view is None and self._journal.state(slot) != FREE:
            drop(self._journal, slot)
        return view


class _Extents:
    """First-fit allocation of byte ranges. Free ranges are sorted and merged with their neighbours."""

    def __init__(self, size: int) -> None:
        self._starts = [0]
        self._ends = [size]

    def allocate(self, size: int) -> int | None:
        for i, start in enumerate(self._starts):
            if self._ends[i] - start >= size:
                self._starts[i] += size
                if self._starts[i] == self._ends[i]:
                    del self._starts[i], self._ends[i]
                return start
        return None

    def take(self, start: int, end: int) -> None:
        """Mark a range as in use."""
        i = bisect.bisect_right(self._starts, start) - 1
        if i < 0 or self._ends[i] < end:
            raise JournalError(f"two journal records share the bytes {start} to {end}")
        free_start, free_end = self._starts[i], self._ends[i]
        pieces = [(a, b) for a, b in ((free_start, start), (end, free_end)) if a < b]
        self._starts[i : i + 1] = [a for a, _ in pieces]
        self._ends[i : i + 1] = [b for _, b in pieces]

    def give(self, start: int, end: int) -> None:
        i = bisect.bisect_left(self._starts, start)
        self._starts.insert(i, start)
        self._ends.insert(i, end)
        if i + 1 < len(self._starts) and self._ends[i] == self._starts[i + 1]:
            self._ends[i : i + 2] = [self._ends[i + 1]]
            del self._starts[i + 1]
        if i > 0 and self._ends[i - 1] == self._starts[i]:
            self._ends[i - 1 : i + 1] = [self._ends[i]]
            del self._starts[i]
