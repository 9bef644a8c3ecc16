"""prepare's part of the journal: records are made, dispatched and used again; anybody may read them."""

from __future__ import annotations

import bisect
import struct
import zlib
from collections import deque
from dataclasses import dataclass

from ..errors import JournalError, Overloaded
from ..record import RequestRecord
from .layout import ACCEPTED, DISPATCHED, FORGOTTEN, FREE, Extent, Journal, extent, split_word, word


@dataclass(frozen=True, slots=True)
class AcceptTimes:
    """CLOCK_MONOTONIC, nanoseconds."""

    received_ns: int
    tokenize_start_ns: int
    tokenize_end_ns: int
    accepted_ns: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """A record as read back, checked."""

    slot: int
    generation: int
    state: int  # ACCEPTED or DISPATCHED
    arrival: int
    accepted_ns: int
    extent: Extent
    record: RequestRecord


def logprob_words(num_alternatives: int | None) -> int:
    """Four-byte words of logprobs a token: the chosen one's, then id and logprob of each alternative."""
    return 0 if num_alternatives is None else 1 + 2 * num_alternatives


def read_request(journal: Journal, slot: int) -> RequestView | None:
    """The request in a slot, or None while there is none (free, or being written at this moment).

    Raises:
        JournalError: the record is published and its bytes are not what was published.
    """
    entry = journal.records[slot]
    generation, state = split_word(entry["prepare_word"])
    if state == FREE:
        return None
    offset, size = int(entry["payload_offset"]), int(entry["payload_bytes"])
    capacity, words = int(entry["token_capacity"]), int(entry["logprob_words"])
    arrival, accepted_ns, expected = int(entry["arrival"]), int(entry["accepted_ns"]), int(entry["crc"])
    payload = journal.arena[offset : offset + size].tobytes()
    current, state = split_word(entry["prepare_word"])
    if current != generation or state == FREE:
        return None  # freed or given to another request meanwhile
    if _crc(payload, generation, offset, capacity, words, arrival, accepted_ns) != expected:
        raise JournalError(f"journal record {slot}: checksum does not match")
    record = RequestRecord.from_bytes(payload)
    return RequestView(slot, generation, state, arrival, accepted_ns, extent(offset, size, capacity, words), record)


def _crc(payload: bytes, *numbers: int) -> int:
    return zlib.crc32(struct.pack(f"<{len(numbers)}Q", *numbers), zlib.crc32(payload))


class RequestWriter:
    """Allocates records and publishes requests. One a journal, in prepare.

    Invariant: the extents of records that are not free do not overlap. The free list is derived from the records, so
    a restarted prepare has it again.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._arena = _Extents(journal.arena_bytes)
        self._free: deque[int] = deque()  # longest free first: a freed record's id is remembered as long as possible
        self._next_arrival = 0
        for slot in range(journal.num_records):
            view = self._read_or_drop(slot)
            if view is None:
                self._free.append(slot)
            else:
                self._arena.take(view.extent.payload_offset, view.extent.end)
                self._next_arrival = max(self._next_arrival, view.arrival + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def past_ids(self) -> list[tuple[str, int]]:
        """``(request id, digest)`` of records that are free now but held a request before."""
        entries = (self._journal.records[slot] for slot in self._free)
        # An id whose generation was never published is of a request that was being written when prepare was killed.
        written = [e for e in entries if e["request_id"] and e["id_generation"] == split_word(e["prepare_word"])[0]]
        # An id that a disk has damaged is nobody's.
        return [(bytes(e["request_id"]).decode(errors="replace"), int(e["digest"])) for e in written]

    def accept(self, record: RequestRecord, times: AcceptTimes) -> tuple[int, int]:
        """Publish a request as ACCEPTED: ``(slot, generation)``. From here on it will be answered.

        Raises:
            Overloaded: no record or no room in the arena is free; nothing was written.
        """
        if not self._free:
            raise Overloaded(f"all {self._journal.num_records} records of the journal are in use")
        payload = record.to_bytes()
        words = logprob_words(record.sampling.get("logprobs"))
        size = extent(0, len(payload), record.token_capacity, words).end
        offset = self._arena.allocate(size)
        if offset is None:
            raise Overloaded(
                f"the request needs {size} bytes of the journal, not so many of {self._journal.arena_bytes} are free"
            )
        slot = self._free.popleft()
        generation = self._write(slot, offset, payload, record, times, words)
        return slot, generation

    def _write(
        self, slot: int, offset: int, payload: bytes, record: RequestRecord, times: AcceptTimes, words: int
    ) -> int:
        entry = self._journal.records[slot]
        generation = (split_word(entry["prepare_word"])[0] + 1) & 0xFFFFFFFF or 1
        self._journal.arena[offset : offset + len(payload)] = memoryview(payload)
        entry["payload_offset"], entry["payload_bytes"] = offset, len(payload)
        entry["token_capacity"], entry["logprob_words"] = record.token_capacity, words
        entry["arrival"] = self._next_arrival
        entry["received_ns"], entry["accepted_ns"] = times.received_ns, times.accepted_ns
        entry["tokenize_start_ns"], entry["tokenize_end_ns"] = times.tokenize_start_ns, times.tokenize_end_ns
        entry["dispatched_ns"] = 0
        entry["id_generation"] = generation
        entry["request_id"], entry["digest"] = record.request_id.encode(), record.digest
        numbers = generation, offset, record.token_capacity, words, self._next_arrival, times.accepted_ns
        entry["crc"] = _crc(payload, *numbers)
        entry["prepare_word"] = word(generation, ACCEPTED)
        self._next_arrival += 1
        return generation

    def dispatch(self, slot: int, generation: int, now_ns: int) -> None:
        """Mark the request as given to execute, which may take it from here on, message or not."""
        entry = self._journal.records[slot]
        entry["dispatched_ns"] = now_ns
        entry["prepare_word"] = word(generation, DISPATCHED)

    def recycle(self, slot: int, generation: int) -> bool:
        """Free the record if summarize has written it off and execute has let go of it; False if not, or if that
        generation is gone already.
        """
        entry = self._journal.records[slot]
        current, state = split_word(entry["prepare_word"])
        if current != generation or state == FREE or int(entry["release_word"]) != word(generation, FORGOTTEN):
            return False
        # NOTE: until execute has said that no token follows, a step in flight may still write one into the extent,
        # which would then be somebody else's.
        if state == DISPATCHED and split_word(entry["finish_word"])[0] != generation:
            return False
        offset, size = int(entry["payload_offset"]), int(entry["payload_bytes"])
        end = extent(offset, size, int(entry["token_capacity"]), int(entry["logprob_words"])).end
        entry["prepare_word"] = word(generation, FREE)
        self._arena.give(offset, end)
        self._free.append(slot)
        return True

    def _read_or_drop(self, slot: int) -> RequestView | None:
        try:
            return read_request(self._journal, slot)
        except JournalError:
            # Not a state a killed process can leave (the word is stored last): the file was damaged. Nothing in this
            # record can be trusted, so it is given up; its client is told that the id is unknown.
            generation, _ = split_word(self._journal.records[slot]["prepare_word"])
            self._journal.records[slot]["prepare_word"] = word(generation, FREE)
            return None


class _Extents:
    """First-fit allocation of byte ranges, neighbours joined. Free ranges are sorted and never touch."""

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
        """Remove a range that is known to be in use."""
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
