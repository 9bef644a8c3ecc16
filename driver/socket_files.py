"""Notices when the file of a worker's socket was deleted: connections go on, but no one can connect any more."""

from __future__ import annotations

import logging
from pathlib import Path

from ..protocol.board import Board
from ..protocol.channels import inbox_name
from ..protocol.run_dir import FOLLOW_SOCKET, SUBMIT_SOCKET
from .worker import Worker

logger = logging.getLogger(__name__)

_FOR_CLIENTS = {"prepare": (SUBMIT_SOCKET,), "execute": (), "summarize": (FOLLOW_SOCKET,)}


class SocketFiles:
    """Those in the run directory. A worker that has lost one is killed: the next one binds its sockets again."""

    def __init__(self, run_dir: Path, board: Board) -> None:
        self._run_dir, self._board = run_dir, board
        self._bound: dict[str, tuple[int, list[str]]] = {}  # by role: its epoch, and the files that it had when ready

    def look(self, worker: Worker) -> None:
        role = worker.role
        if not worker.alive or worker.killed or not self._board.ready(role):
            return
        epoch = self._board.epoch(role)
        if self._bound.get(role, (0, []))[0] != epoch:
            names = (*_FOR_CLIENTS[role], inbox_name(role))
            self._bound[role] = epoch, [name for name in names if self._exists(name)]
        lost = next((name for name in self._bound[role][1] if not self._exists(name)), None)
        if lost is not None and self._run_dir.exists():  # otherwise the next worker would find nothing
            logger.warning("%s was deleted: restarting %s, which no one can connect to", self._run_dir / lost, role)
            worker.kill()

    def _exists(self, name: str) -> bool:
        return (self._run_dir / name).exists()
