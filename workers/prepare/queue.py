"""Accepted requests that wait for a credit, in the order in which they get one. Pure."""

from __future__ import annotations

import heapq
from typing import NamedTuple


class Waiting(NamedTuple):
    """One request as execute will be told of it."""

    slot: int
    generation: int
    record: bytes


class CreditQueue:
    """The lowest ``arrival + ageing * priority`` goes first: the order in which the scheduler takes them, too.

    With ``ageing`` 0 that is the order of arrival. Otherwise so many later arrivals outweigh one level of priority, so
    nobody starves, and the order of two requests never changes.

    A removed request stays in the heap as a stale entry until it surfaces or half of the heap is stale.
    """

    def __init__(self, ageing: int) -> None:
        self._ageing = ageing
        self._heap: list[tuple[int, int, int, int]] = []  # urgency, arrival, slot, generation
        self._waiting: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, slot: int, generation: int, record: bytes, *, arrival: int, priority: int) -> None:
        self._waiting[slot] = Waiting(slot, generation, record)
        heapq.heappush(self._heap, (arrival + self._ageing * priority, arrival, slot, generation))

    def pop(self) -> Waiting:
        """The next one; there must be one."""
        while True:
            _, _, slot, generation = heapq.heappop(self._heap)
            if self._waits(slot, generation):
                return self._waiting.pop(slot)

    def remove(self, slot: int, generation: int) -> bool:
        """Whether this request did wait; now it does not."""
        if not self._waits(slot, generation):
            return False
        del self._waiting[slot]
        if len(self._heap) > 2 * len(self._waiting) + 8:
            self._heap = [entry for entry in self._heap if self._waits(entry[2], entry[3])]
            heapq.heapify(self._heap)
        return True

    def _waits(self, slot: int, generation: int) -> bool:
        waiting = self._waiting.get(slot)
        return waiting is not None and waiting.generation == generation
