"""What each client has under way, so that no one of them can take all there is."""

from __future__ import annotations

from collections import Counter

from ...protocol.errors import Overloaded
from .turns import Owner


class Quotas:
    """Counts for each owner the sequences of requests that are accepted and not released, those
    whose record the journal keeps, also for an answer that nobody reads, and the bytes of prompts that wait for the
    tokenizer. A request of several choices or beams counts as so many: each takes a record, a credit and a row.

    After a restart those of a key count for it again, for the journal knows its number; those of a connection count for
    no one, for that is gone.
    """

    def __init__(self, *, max_requests: int, max_bytes: int, max_unread: int) -> None:
        self._max_requests, self._max_bytes, self._max_unread = max_requests, max_bytes, max_unread
        self._requests: Counter[Owner] = Counter()
        self._records: Counter[Owner] = Counter()
        self._bytes: Counter[Owner] = Counter()
        self._owners: dict[tuple[int, int], Owner] = {}  # of a slot and generation that is not forgotten
        self._running: set[tuple[int, int]] = set()  # and of these those that are not released

    def check(self, owner: Owner, num_bytes: int) -> None:
        """Whether this owner may have one more request, ``num_bytes`` of which would wait for the tokenizer.

        Raises:
            Overloaded: it has as much as one may have.
        """
        if self._requests[owner] >= self._max_requests:
            raise Overloaded(
                f"this client has {self._requests[owner]} sequences that are not answered (a request of several choices"
                f" or beams has so many), the limit is max_client_requests, {self._max_requests}"
            )
        if self._records[owner] >= self._max_unread:
            raise Overloaded(
                f"this client has {self._records[owner]} sequences whose ends it has not acknowledged,"
                f" the limit is {self._max_unread}"
            )
        if num_bytes and self._bytes[owner] + num_bytes > self._max_bytes:
            raise Overloaded(
                f"{self._bytes[owner]} bytes of this client's prompts wait for the tokenizer,"
                f" {num_bytes} more pass the limit, max_client_bytes, {self._max_bytes}"
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
        """That request ended; whoever had it may have another. Of one that is not known nothing happens."""
        if (slot, generation) in self._running:
            self._running.remove((slot, generation))
            _take_one(self._requests, self._owners[slot, generation])

    def forgotten(self, slot: int, generation: int) -> None:
        """Its answer is kept for nobody any more. Of one that is not known nothing happens."""
        self.released(slot, generation)
        owner = self._owners.pop((slot, generation), None)
        if owner is not None:
            _take_one(self._records, owner)


def _take_one(counter: Counter[Owner], owner: Owner) -> None:
    counter[owner] -= 1
    if not counter[owner]:
        del counter[owner]
