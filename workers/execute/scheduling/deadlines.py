"""Who must have begun, or ended, by when."""

from __future__ import annotations

import heapq

from .sequence import Key, Sequence


class Deadlines:
    """Times of live sequences, the next one first.

    An entry of a sequence that has ended stays until its time comes or half of the entries are stale, so a step that
    nobody exceeds costs one comparison.
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
        """Whose time has come, once for each; who of them is still live, the caller knows."""
        keys = []
        while self._heap and self._heap[0][0] <= now_ns:
            keys.append(heapq.heappop(self._heap)[1])
        return keys

    def tidy(self, live: dict[Key, Sequence]) -> None:
        """Forgets those that are not live, when there are many of them."""
        if len(self._heap) > 4 * len(live) + 8:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)


def exceeded(sequence: Sequence, now_ns: int, *, num_awaited: int = 0) -> str | None:
    """Which deadline a live sequence has missed, in words. The one of the queue is met by whoever has ever begun, and
    for all sequences of a request by the first of them, which computes the prompt of the others.

    ``num_awaited`` of its tokens are placeholders.
    """
    if 0 < sequence.deadline_at <= now_ns:
        return f"deadline exceeded after {sequence.num_output_tokens - num_awaited} tokens"
    if 0 < sequence.queue_deadline_at <= now_ns and not _has_begun(sequence):
        return "deadline exceeded before the request was scheduled"
    return None


def _has_begun(sequence: Sequence) -> bool:
    has_sibling = sequence.group is not None and sequence.group.has_begun
    return has_sibling or sequence.last_step > 0 or sequence.num_output_tokens > 0
