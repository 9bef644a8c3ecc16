"""Sends ACCEPTED to clients, once their requests are stored as durably as configured."""

from __future__ import annotations

from ...protocol.channels import Router
from ...protocol.messages import Accepted
from ..process import WorkerContext


class Confirmations:
    """Sent at once if the journal is in memory; if it is on a disk, after it was flushed."""

    def __init__(self, context: WorkerContext, router: Router) -> None:
        self._context, self._router = context, router
        self._flushes = context.config.service.flushes_accepted
        self._waiting: list[tuple[bytes, Accepted]] = []

    def send(self, peer: bytes, accepted: Accepted) -> None:
        if self._flushes:
            self._waiting.append((peer, accepted))
        else:
            self._router.send(peer, accepted)

    def flush(self) -> None:
        """Send what is waiting, after one flush for all of it."""
        if self._waiting:
            self._context.flush_journal()
            for peer, accepted in self._waiting:
                self._router.send(peer, accepted)
            self._waiting.clear()
