"""Sends answers to their readers: one Text per client and step, one end per request, within each reader's window."""

from __future__ import annotations

import time

from ...protocol import messages as m
from ...protocol.channels import Router
from ...protocol.journal.layout import Journal
from .answer import Answer

SENDING_S = 0.05  # per turn, plus one answer: a single FOLLOW may ask for a thousand answers of megabytes each
RETRY_S = 0.01  # before sending again to a client that could not take a message


class Delivery:
    """Answers that changed since they were last sent.

    An answer whose reader cannot take it stays here and is retried; one whose window is full, or whose reader is gone,
    leaves, and comes back with the next FOLLOW.
    """

    def __init__(self, router: Router, journal: Journal, *, window: int) -> None:
        self._router = router
        self._journal = journal
        self._window = window
        self._changed: dict[Answer, None] = {}  # oldest first
        self._stalled: dict[Answer, None] = {}  # whose reader cannot take more
        self._full: dict[bytes, float] = {}  # those readers, and when each is retried

    @property
    def pending(self) -> bool:
        return bool(self._changed or self._stalled)

    @property
    def has_untold(self) -> bool:
        """Whether there are changed answers that ``deliver`` has not tried to send yet."""
        return bool(self._changed)

    @property
    def wait_s(self) -> float | None:
        """Seconds until the next ``deliver`` is due; None if nothing is waiting."""
        if self._changed:
            return 0.0
        return RETRY_S if self._stalled else None

    def mark(self, answer: Answer) -> None:
        if answer not in self._stalled:
            self._changed[answer] = None

    def drop(self, answer: Answer) -> None:
        self._changed.pop(answer, None)
        self._stalled.pop(answer, None)

    def deliver(self) -> None:
        """Send what can be sent now, oldest first; what exceeds the time of one turn is left to the next."""
        now = time.monotonic()
        self._resume_stalled(now)
        rows: dict[bytes, list[tuple[Answer, m.DeltaRow]]] = {}
        for answer in list(self._changed):
            del self._changed[answer]
            if answer.peer is not None:
                self._deliver_one(answer, answer.peer, rows, now)
                if time.monotonic() > now + SENDING_S:
                    break
        for peer, batch in rows.items():
            self._send_rows(peer, batch)

    def _resume_stalled(self, now: float) -> None:
        if not self._stalled:
            self._full.clear()
        elif now >= min(self._full.values(), default=0.0):
            self._changed.update(self._stalled)
            self._stalled.clear()

    def _deliver_one(
        self, answer: Answer, peer: bytes, rows: dict[bytes, list[tuple[Answer, m.DeltaRow]]], now: float
    ) -> None:
        if self._full.get(peer, 0.0) > now:
            self._stalled[answer] = None
        elif answer.stream.finish_reason is not None:
            self._send_end(answer, peer)
        elif (row := answer.next_row(self._journal, self._window)) is not None:
            if peer in self._full:  # alone: assembling rows that cannot be sent would take time from other readers
                self._send_rows(peer, [(answer, row)])
            else:
                rows.setdefault(peer, []).append((answer, row))

    def _send_end(self, answer: Answer, peer: bytes) -> None:
        """Send the terminal message, or the rows that must come before it."""
        if (end := answer.next_end(self._journal, self._window)) is not None:
            if self._send(peer, end, [answer]):
                answer.end_sent_to = peer
                answer.num_sent = answer.stream.num_tokens
        elif (row := answer.next_row(self._journal, self._window)) is not None:
            self._send_rows(peer, [(answer, row)])

    def _send_rows(self, peer: bytes, batch: list[tuple[Answer, m.DeltaRow]]) -> None:
        if self._send(peer, m.Text([row for _, row in batch]), [answer for answer, _ in batch]):
            for answer, row in batch:
                answer.sent(row)

    def _send(self, peer: bytes, message: m.Text | m.Finished | m.Failed, answers: list[Answer]) -> bool:
        """Whether it was sent."""
        try:
            if self._router.deliver(peer, message):
                self._full.pop(peer, None)
                return True
        except ConnectionError:
            self._full.pop(peer, None)
            for answer in answers:
                answer.peer = None
        else:
            self._full[peer] = time.monotonic() + RETRY_S
            self._stalled.update(dict.fromkeys(answers))
        return False
