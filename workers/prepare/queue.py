"""Accepted requests waiting for credits, in the order in which they will get them. Pure."""

from __future__ import annotations

import heapq
from typing import NamedTuple


class Waiting(NamedTuple):
    """One sequence, as it will be sent to execute."""

    slot: int
    generation: int
    record: bytes


class CreditQueue:
    """The lowest ``arrival + ageing * priority`` goes first, the same order as in execute's scheduler.

    With ``ageing`` 0 this is the order of arrival. Otherwise that many later arrivals outweigh one level of priority,
    so no request starves, and the relative order of two requests never changes.

    All sequences of a request leave together, and requests behind it wait until they can. So requests with many
    sequences are not starved by small ones, and no request holds part of what another one is waiting for. A request
    with more sequences than there are credits, accepted under another configuration, leaves once no credit is in use.

    A removed request stays in the heap as a stale entry until it surfaces or half of the heap is stale.
    """

    def __init__(self, ageing: int) -> None:
        self._ageing = ageing
        self._heap: list[tuple[int, int, str]] = []  # urgency, arrival, request id
        self._arrivals: dict[str, int] = {}  # of the first sequence of each waiting request
        self._waiting: dict[str, dict[int, Waiting]] = {}  # its sequences, by slot
        self._owners: dict[int, str] = {}  # slot -> request id

    def __len__(self) -> int:
        """Number of requests, however many sequences they have."""
        return len(self._waiting)

    def push(self, request_id: str, waiting: Waiting, *, arrival: int, priority: int) -> None:
        """Add one sequence of a request; its others must follow before the next ``pop``."""
        if request_id not in self._waiting:
            self._waiting[request_id], self._arrivals[request_id] = {}, arrival
            heapq.heappush(self._heap, (arrival + self._ageing * priority, arrival, request_id))
        self._waiting[request_id][waiting.slot] = waiting
        self._owners[waiting.slot] = request_id

    def pop(self, num_credits: int, *, is_idle: bool = False) -> list[Waiting]:
        """All sequences of the next request if there are enough credits, or if none is in use; otherwise nothing."""
        while self._heap and not self._waits(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap or (len(self._waiting[self._heap[0][2]]) > num_credits and not is_idle):
            return []
        _, _, request_id = heapq.heappop(self._heap)
        sequences = list(self._waiting[request_id].values())
        for waiting in sequences:
            del self._owners[waiting.slot]
        self._forget(request_id)
        return sequences

    def remove(self, slot: int, generation: int) -> bool:
        """Remove a sequence; whether it was waiting."""
        request_id = self._owners.get(slot)
        if request_id is None or self._waiting[request_id][slot].generation != generation:
            return False
        del self._owners[slot], self._waiting[request_id][slot]
        if not self._waiting[request_id]:
            self._forget(request_id)
            if len(self._heap) > 2 * len(self._waiting) + 8:
                self._heap = [entry for entry in self._heap if self._waits(entry)]
                heapq.heapify(self._heap)
        return True

    def _forget(self, request_id: str) -> None:
        del self._waiting[request_id], self._arrivals[request_id]

    def _waits(self, entry: tuple[int, int, str]) -> bool:
        _, arrival, request_id = entry
        return self._arrivals.get(request_id) == arrival
