"""Deadlines: by when each sequence must have begun, or ended."""

from __future__ import annotations

import heapq

from .sequence import Key, Sequence


class Deadlines:
    """Deadlines of live sequences, the earliest first.

    The entry of an ended sequence stays until it is due or stale entries prevail, so a step in which nothing is due
    costs one comparison.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, Key]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        for at_ns in (sequence.deadline_at, sequence.queue_deadline_at):
            if at_ns:
                heapq.heappush(self._heap, (at_ns, sequence.key))

    def due(self, now_ns: int) -> list[Key]:
        """Keys of the due entries, which are removed. The caller knows which of them are still live."""
        keys = []
        while self._heap and self._heap[0][0] <= now_ns:
            keys.append(heapq.heappop(self._heap)[1])
        return keys

    def tidy(self, live: dict[Key, Sequence]) -> None:
        """Remove entries of sequences that are not live, if there are many."""
        if len(self._heap) > 4 * len(live) + 8:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)


def exceeded(sequence: Sequence, now_ns: int, *, num_awaited: int = 0) -> str | None:
    """Why a live sequence has missed a deadline, in words; None if it has not.

    The queue deadline is met once the sequence has started, and for all sequences of a request once the first of them
    has, as it computes the prompt for all. ``num_awaited`` of its tokens are placeholders.
    """
    if 0 < sequence.deadline_at <= now_ns:
        return f"deadline exceeded after {sequence.num_output_tokens - num_awaited} tokens"
    if 0 < sequence.queue_deadline_at <= now_ns and not _has_begun(sequence):
        return "deadline exceeded before the request was scheduled"
    return None


def _has_begun(sequence: Sequence) -> bool:
    has_sibling = sequence.group is not None and sequence.group.has_begun
    return has_sibling or sequence.last_step > 0 or sequence.num_output_tokens > 0
