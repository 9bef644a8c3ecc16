"""Answers to their readers: one Text a client and step, one end a request, never more than a reader asked for."""

from __future__ import annotations

from ...protocol import messages as m
from ...protocol.channels import Router
from ...protocol.journal.layout import Journal
from .answer import Answer


class Delivery:
    """The answers that changed since they were last sent.

    An answer whose reader cannot take it stays here and is tried again; one whose window is full, or whose reader is
    gone, leaves, and comes back with the next FOLLOW.
    """

    def __init__(self, router: Router, journal: Journal, *, window: int) -> None:
        self._router = router
        self._journal = journal
        self._window = window
        self._changed: dict[Answer, None] = {}  # oldest first

    @property
    def pending(self) -> bool:
        return bool(self._changed)

    def mark(self, answer: Answer) -> None:
        self._changed[answer] = None

    def drop(self, answer: Answer) -> None:
        self._changed.pop(answer, None)

    def deliver(self) -> None:
        """Send what may be sent now."""
        rows: dict[bytes, list[tuple[Answer, m.DeltaRow]]] = {}
        changed, self._changed = self._changed, {}
        for answer in changed:
            if answer.peer is None:
                continue
            if answer.stream.finish_reason is not None:
                self._send_end(answer, answer.peer)
            elif (row := answer.next_row(self._journal, self._window)) is not None:
                rows.setdefault(answer.peer, []).append((answer, row))
        for peer, batch in rows.items():
            self._send_rows(peer, batch)

    def _send_end(self, answer: Answer, peer: bytes) -> None:
        """Send the terminal message, or what must come before it."""
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
        """Whether it left."""
        try:
            if self._router.deliver(peer, message):
                return True
        except ConnectionError:
            for answer in answers:
                answer.peer = None
        else:
            for answer in answers:
                self.mark(answer)
        return False
