"""Each client's share of the pipeline, limited so that no single client can take all of it."""

from __future__ import annotations

from collections import Counter

from ...protocol.errors import Overloaded
from .turns import Owner


class Quotas:
    """Counts per owner: sequences accepted and not released; sequences with a record in the journal, including answers
    that nobody reads; and bytes of prompts waiting for the tokenizer. A request with several choices or beams counts
    as that many: each takes a record, a credit and a row.

    After a restart the requests of a key still count towards it, as the journal has its number; those of a connection
    count towards nobody, as the connection is gone.
    """

    def __init__(self, *, max_requests: int, max_bytes: int, max_unread: int) -> None:
        self._max_requests, self._max_bytes, self._max_unread = max_requests, max_bytes, max_unread
        self._requests: Counter[Owner] = Counter()
        self._records: Counter[Owner] = Counter()
        self._bytes: Counter[Owner] = Counter()
        self._owners: dict[tuple[int, int], Owner] = {}  # by slot and generation, until forgotten
        self._running: set[tuple[int, int]] = set()  # those of them that are not released

    def check(self, owner: Owner, num_bytes: int) -> None:
        """Whether this owner may have one more request, ``num_bytes`` of which would wait for the tokenizer.

        Raises:
            Overloaded: it has reached a limit.
        """
        if self._requests[owner] >= self._max_requests:
            raise Overloaded(
                f"this client of the pipeline, or this HTTP gateway, has {self._requests[owner]} unanswered sequences"
                f" (a request with several choices or beams has that many), the limit is max_client_requests,"
                f" {self._max_requests}"
            )
        if self._records[owner] >= self._max_unread:
            raise Overloaded(
                f"this client has {self._records[owner]} sequences with unacknowledged ends,"
                f" the limit is {self._max_unread}; each is kept until it is acknowledged or its lease ends",
                param="lease_s",
            )
        # One request is allowed however large: refused as "overloaded", it would be sent again and again.
        if num_bytes and self._bytes[owner] and self._bytes[owner] + num_bytes > self._max_bytes:
            raise Overloaded(
                f"{self._bytes[owner]} bytes of this client's prompts are waiting for the tokenizer,"
                f" {num_bytes} more exceed the limit, max_client_bytes, {self._max_bytes}"
            )

    def waits(self, owner: Owner, num_bytes: int) -> None:
        self._bytes[owner] += num_bytes

    def waited(self, owner: Owner, num_bytes: int) -> None:
        self._bytes[owner] -= num_bytes
        if not self._bytes[owner]:
            del self._bytes[owner]

    def accepted(self, owner: Owner, slot: int, generation: int) -> None:
        self._owners[slot, generation] = owner
        self._running.add((slot, generation))
        self._requests[owner] += 1
        self._records[owner] += 1

    def released(self, slot: int, generation: int) -> None:
        """The sequence ended; its owner may have another. No effect if it is unknown."""
        if (slot, generation) in self._running:
            self._running.remove((slot, generation))
            _take_one(self._requests, self._owners[slot, generation])

    def forgotten(self, slot: int, generation: int) -> None:
        """Its record is no longer kept. No effect if it is unknown."""
        self.released(slot, generation)
        owner = self._owners.pop((slot, generation), None)
        if owner is not None:
            _take_one(self._records, owner)


def _take_one(counter: Counter[Owner], owner: Owner) -> None:
    counter[owner] -= 1
    if not counter[owner]:
        del counter[owner]
