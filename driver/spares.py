"""Processes in reserve: started, with everything imported, waiting to be told that they are the next life of a role.

What a restart costs is mostly Python's imports. A spare has them behind it. It holds no socket and no model.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

Start = Callable[..., "subprocess.Popen[bytes]"]


class Spares:
    """At most one a role."""

    def __init__(self, run_dir: Path, start: Start) -> None:
        """``start(role, stdin=..., log=..., arguments=...)`` makes a process; see ``Supervisor``."""
        self._run_dir = run_dir
        self._start = start
        self._waiting: dict[str, subprocess.Popen[bytes]] = {}

    def has(self, role: str) -> bool:
        return role in self._waiting

    def fill(self, role: str) -> None:
        self._waiting[role] = self._start(role, stdin=subprocess.PIPE, log=self._log(role), arguments=["--spare"])

    def take(self, role: str, epoch: int) -> subprocess.Popen[bytes] | None:
        """The spare as the given life of its role, or None if there is none that lives."""
        process = self._waiting.pop(role, None)
        if process is None:
            return None
        assert process.stdin is not None, "a spare listens"
        try:
            with process.stdin:
                process.stdin.write(b"%d\n" % epoch)
            os.replace(self._log(role), self._run_dir / f"{role}.log")
        except OSError:  # it died while it waited
            _end(process)
            return None
        return process

    def close(self) -> None:
        for role, process in self._waiting.items():
            _end(process)
            self._log(role).unlink(missing_ok=True)
        self._waiting.clear()

    def _log(self, role: str) -> Path:
        return self._run_dir / f"{role}.spare.log"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
