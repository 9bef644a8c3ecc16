"""The queue of waiting sequences."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from .sequence import Key, Sequence

Rank = tuple[int, ...]


class WaitingQueue:
    """Sequences that hold no page, lowest rank first. One that is held waits too, and is passed by.

    A removed sequence stays in the heap as a stale entry until it surfaces or half of the heap is stale, so every
    operation costs O(log n) amortised, whatever is removed.
    """

    def __init__(self, rank: Callable[[Sequence], Rank]) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, Key]] = []
        self._waiting: dict[Key, Sequence] = {}
        self._held: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting

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
            if sequence is not None and key not in self._held and self._rank(sequence) == rank:
                return sequence
            heapq.heappop(self._heap)
        return None

    def push(self, sequence: Sequence) -> None:
        assert sequence.key not in self._waiting, f"{sequence.key} waits already"
        self._waiting[sequence.key] = sequence
        heapq.heappush(self._heap, (self._rank(sequence), sequence.key))

    def hold(self, sequence: Sequence) -> None:
        """Lets ``sequence`` wait, if it does not yet, and passes it by until ``let_go``."""
        self._waiting[sequence.key] = sequence
        self._held.add(sequence.key)

    def let_go(self, sequence: Sequence) -> None:
        """Its place in the queue is that of its rank again."""
        if sequence.key in self._held:
            self._held.remove(sequence.key)
            heapq.heappush(self._heap, (self._rank(sequence), sequence.key))

    def remove(self, key: Key) -> None:
        del self._waiting[key]
        self._held.discard(key)
        if len(self._heap) > 2 * len(self._waiting) + 8:
            self._heap = [(self._rank(s), key) for key, s in self._waiting.items() if key not in self._held]
            heapq.heapify(self._heap)
