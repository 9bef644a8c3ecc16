"""Deadlines of requests, enforced even when no other worker could."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from ...protocol.board import Board
from ...protocol.errors import DeadlineExceeded
from ...protocol.journal.layout import ACCEPTED, Journal
from ...protocol.record import RequestRecord
from ...protocol.record_key import Key
from .answer import Answer

LOOK_AGAIN_NS = 250_000_000  # how often to check a request on which execute decides


class Deadlines:
    """The upcoming deadlines of live requests.

    Entries of ended requests are removed when they are due, or once there are many of them.
    """

    def __init__(self, journal: Journal, board: Board) -> None:
        self._journal = journal
        self._board = board
        self._heap: list[tuple[int, Key]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, key: Key, record: RequestRecord) -> None:
        for at_ns in (record.deadline_at, record.queue_deadline_at):
            if at_ns:
                heapq.heappush(self._heap, (at_ns, key))

    def wait_s(self, now_ns: int, longest_s: float) -> float:
        """Seconds until the next deadline, at most ``longest_s``."""
        if not self._heap:
            return longest_s
        return min(longest_s, max(0.0, (self._heap[0][0] - now_ns) / 1e9))

    def due(self, now_ns: int) -> list[Key]:
        """Requests with an expired deadline; the caller knows which of them are still live."""
        keys = []
        while self._heap and self._heap[0][0] <= now_ns:
            keys.append(heapq.heappop(self._heap)[1])
        return keys

    def tidy(self, is_live: Callable[[Key], bool], *, num_live: int) -> None:
        """Remove entries of ended requests, once there are many."""
        if len(self._heap) > 4 * num_live + 64:
            self._heap = [entry for entry in self._heap if is_live(entry[1])]
            heapq.heapify(self._heap)

    def judge(self, answer: Answer, now_ns: int) -> DeadlineExceeded | None:
        """The error with which a live request whose deadline is due must end; None if it need not, or not yet."""
        record = answer.view.record
        if 0 < record.deadline_at <= now_ns:
            return DeadlineExceeded(f"deadline exceeded after {answer.stream.num_tokens} tokens")
        if any(each.has_begun(self._journal) for each in answer.choices.answers.values()):
            return None
        has_no_credit = self._journal.state(answer.view.slot) == ACCEPTED
        if has_no_credit or not self._board.ready("execute"):
            return DeadlineExceeded("deadline exceeded before the request was scheduled")
        heapq.heappush(self._heap, (now_ns + LOOK_AGAIN_NS, answer.key))  # only execute knows what has just started
        return None
