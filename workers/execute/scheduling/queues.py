"""The queue of waiting sequences."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from .sequence import Key, Sequence

Rank = tuple[int, ...]


class WaitingQueue:
    """Sequences that hold no page, lowest rank first.

    A removed sequence stays in the heap as a stale entry until it surfaces or half of the heap is stale, so every
    operation costs O(log n) amortised, whatever is removed.
    """

    def __init__(self, rank: Callable[[Sequence], Rank]) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, Key]] = []
        self._waiting: dict[Key, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._waiting.values(), key=self._rank))

    @property
    def head(self) -> Sequence | None:
        """The sequence that is next, left where it is."""
        while self._heap:
            rank, key = self._heap[0]
            sequence = self._waiting.get(key)
            if sequence is not None and self._rank(sequence) == rank:
                return sequence
            heapq.heappop(self._heap)
        return None

    def push(self, sequence: Sequence) -> None:
        assert sequence.key not in self._waiting, f"{sequence.key} waits already"
        self._waiting[sequence.key] = sequence
        heapq.heappush(self._heap, (self._rank(sequence), sequence.key))

    def remove(self, key: Key) -> None:
        del self._waiting[key]
        if len(self._heap) > 2 * len(self._waiting) + 8:
            self._heap = [(self._rank(sequence), key) for key, sequence in self._waiting.items()]
            heapq.heapify(self._heap)
