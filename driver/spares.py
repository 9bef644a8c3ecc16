"""Spare processes: started, with everything imported, waiting to be told which epoch of their role they are.

Most of the cost of a restart is Python's imports, which a spare has already done. It holds no socket and no model.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from ..protocol.private_file import remove_if_possible
from .processes import log_of

Start = Callable[..., "subprocess.Popen[bytes]"]


class Spares:
    """At most one per role."""

    def __init__(self, run_dir: Path, start: Start) -> None:
        """``start(role, stdin=..., log=..., arguments=...)`` starts a process; see ``Supervisor``."""
        self._run_dir = run_dir
        self._start = start
        self._waiting: dict[str, subprocess.Popen[bytes]] = {}

    def has(self, role: str) -> bool:
        return role in self._waiting

    def fill(self, role: str) -> None:
        self._waiting[role] = self._start(role, stdin=subprocess.PIPE, log=self._log(role), arguments=["--spare"])

    def take(self, role: str, epoch: int) -> subprocess.Popen[bytes] | None:
        """The spare as the given epoch of its role; None if there is none alive."""
        process = self._waiting.pop(role, None)
        if process is None:
            return None
        if process.poll() is not None:  # writing to it would raise SIGPIPE, which ends some host programs
            _end(process)
            return None
        assert process.stdin is not None, "a spare listens"
        try:
            with process.stdin:
                process.stdin.write(b"%d\n" % epoch)
            os.replace(self._log(role), log_of(self._run_dir, role))
        except OSError:  # it died just now
            _end(process)
            return None
        return process

    def close(self) -> None:
        for role, process in self._waiting.items():
            _end(process)
            remove_if_possible(self._log(role))
        self._waiting.clear()

    def _log(self, role: str) -> Path:
        return self._run_dir / f"{role}.spare.log"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
