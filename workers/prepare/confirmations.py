"""ACCEPTED to the clients, once the request is where it was promised to be."""

from __future__ import annotations

from ...protocol.channels import Router
from ...protocol.messages import Accepted
from ..process import WorkerContext


class Confirmations:
    """Said at once where the journal lies in memory; where it lies on a disk, once it is written there."""

    def __init__(self, context: WorkerContext, router: Router) -> None:
        self._context, self._router = context, router
        self._flushes = context.config.service.flushes_accepted
        self._waiting: list[tuple[bytes, Accepted]] = []

    def say(self, peer: bytes, accepted: Accepted) -> None:
        if self._flushes:
            self._waiting.append((peer, accepted))
        else:
            self._router.send(peer, accepted)

    def flush(self) -> None:
        """Say what waits, after one flush for all of it."""
        if self._waiting:
            self._context.flush_journal()
            for peer, accepted in self._waiting:
                self._router.send(peer, accepted)
            self._waiting.clear()
