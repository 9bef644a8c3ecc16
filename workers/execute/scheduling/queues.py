"""The queue of waiting sequences."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from ....protocol.config import SchedulerConfig
from .sequence import Key, Sequence

Rank = tuple[int, ...]


def may_overtake(held_back: list[Sequence], config: SchedulerConfig) -> bool:
    """Whether sequences behind ``held_back`` may be tried. Preempted ones are never overtaken, others not too often."""
    return not held_back or (
        len(held_back) <= config.skip_ahead
        and not held_back[0].num_preemptions
        and all(sequence.num_overtaken < config.max_prefill_skip for sequence in held_back)
    )


class WaitingQueue:
    """Sequences that hold no page, lowest rank first. Held ones wait too, but are skipped.

    A removed sequence leaves a stale entry in the heap until it surfaces or half of the heap is stale, so every
    operation costs O(log n) amortised.
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
        """The next sequence, without removing it."""
        while self._heap:
            rank, key = self._heap[0]
            sequence = self._waiting.get(key)
            if sequence is not None and key not in self._held and self._rank(sequence) == rank:
                return sequence
            heapq.heappop(self._heap)
        return None

    def push(self, sequence: Sequence) -> None:
        assert sequence.key not in self._waiting, f"{sequence.key} is already waiting"
        self._waiting[sequence.key] = sequence
        heapq.heappush(self._heap, (self._rank(sequence), sequence.key))

    def hold(self, *sequences: Sequence) -> None:
        """Put these in the queue if they are not, and skip them until ``unhold``."""
        for sequence in sequences:
            self._waiting[sequence.key] = sequence
            self._held.add(sequence.key)

    def unhold(self, sequences: Iterable[Sequence]) -> None:
        """Return them to their place in the queue by rank."""
        for sequence in sequences:
            if sequence.key in self._held:
                self._held.remove(sequence.key)
                heapq.heappush(self._heap, (self._rank(sequence), sequence.key))

    def remove(self, key: Key) -> None:
        del self._waiting[key]
        self._held.discard(key)
        if len(self._heap) > 2 * len(self._waiting) + 8:
            self._heap = [(self._rank(s), key) for key, s in self._waiting.items() if key not in self._held]
            heapq.heapify(self._heap)
