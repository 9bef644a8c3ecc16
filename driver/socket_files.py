"""Notices when sockets of workers were deleted: connections go on, but no one can connect any more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ..protocol.board import ROLES, Board
from ..protocol.channels import inbox_endpoint
from ..protocol.config import ServiceConfig
from ..protocol.errors import PipelineClosed
from ..protocol.run_dir import follow_endpoint, submit_endpoint
from .worker import Worker

logger = logging.getLogger(__name__)


class SocketFiles:
    """Those of one pipeline. A worker that has lost one is killed: the next one binds its sockets again.

    Nothing brings back a run directory that was deleted. The pipeline then answers whoever is connected.
    """

    def __init__(
        self, run_dir: Path, service: ServiceConfig, board: Board, *, on_deleted: Callable[[PipelineClosed], None]
    ) -> None:
        """``on_deleted`` is called once if the run directory is gone, with an error for those who cannot connect."""
        self._run_dir, self._board, self._on_deleted = run_dir, board, on_deleted
        public = {"prepare": submit_endpoint(run_dir, service), "summarize": follow_endpoint(run_dir, service)}
        names = {role: [inbox_endpoint(run_dir, role), *filter(None, [public.get(role)])] for role in ROLES}
        files = {role: [Path(name.removeprefix("ipc://")) for name in names[role]] for role in ROLES}
        # Whether a relative path elsewhere exists is not for this process to say, whose directory may change.
        self._files = {role: [file for file in files[role] if file.parent == run_dir] for role in ROLES}
        self.problem = ""  # what an operator should know

    def look(self, worker: Worker) -> None:
        """In the supervisor's thread."""
        if not worker.alive or worker.killed or not self._board.ready(worker.role):
            return
        lost = next((file for file in self._files[worker.role] if not file.exists()), None)
        if lost is None:
            return
        if self._run_dir.exists():
            logger.warning("%s was deleted: restarting %s, which no one can connect to", lost, worker.role)
            worker.kill()
        elif not self.problem:  # the next worker would find nothing
            text = f"the run directory {self._run_dir} was deleted: no one can connect, no worker can be started again"
            self.problem = text
            logger.error("%s", text)
            self._on_deleted(PipelineClosed(text))
