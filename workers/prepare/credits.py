"""Accepted requests that wait for room in execute."""

from __future__ import annotations

from typing import NamedTuple


class WaitingRecord(NamedTuple):
    """A record of the journal that is not dispatched yet."""

    slot: int
    generation: int
    record: bytes


class CreditQueue:
    """Requests in order of arrival. All sequences of one leave at once, and none overtakes it while they do not fit.

    So a request of many sequences is not starved by those of few, and none holds a part of what another waits for.
    """

    def __init__(self) -> None:
        self._requests: dict[str, dict[int, WaitingRecord]] = {}  # by request id, then by slot
        self._owners: dict[int, str] = {}  # slot -> request id

    def __len__(self) -> int:
        """Requests, whatever the number of their sequences."""
        return len(self._requests)

    def push(self, request_id: str, record: WaitingRecord) -> None:
        self._requests.setdefault(request_id, {})[record.slot] = record
        self._owners[record.slot] = request_id

    def remove(self, slot: int, generation: int) -> bool:
        """One sequence ended while it waited; False if it does not wait here."""
        request_id = self._owners.get(slot)
        if request_id is None or self._requests[request_id][slot].generation != generation:
            return False
        del self._owners[slot], self._requests[request_id][slot]
        if not self._requests[request_id]:
            del self._requests[request_id]
        return True

    def pop(self, num_credits: int) -> list[WaitingRecord]:
        """The sequences of the first request, if there are credits for all of them."""
        request_id = next(iter(self._requests), None)
        if request_id is None or len(self._requests[request_id]) > num_credits:
            return []
        records = list(self._requests.pop(request_id).values())
        for record in records:
            del self._owners[record.slot]
        return records
