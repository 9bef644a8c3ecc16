"""A worker's process: how it is started, and its last log lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..protocol.lifeline import child_environment

KEPT_STDERR_LINES = 40
KEPT_STDERR_BYTES = 1 << 16


def log_of(run_dir: Path, role: str) -> Path:
    """Where a worker writes its standard output and error."""
    return run_dir / f"{role}.log"


def start_process(
    run_dir: Path, role: str, *, arguments: list[str], stdin: int, log: Path | None
) -> subprocess.Popen[bytes]:
    """Run ``python -m`` on a worker's module, in a new session; it is killed when the calling thread ends.

    Raises:
        OSError: no process can be created, or no descriptor is left.
    """
    package = f"{__package__.rpartition('.')[0]}.workers.{role}"
    command = [sys.executable, "-m", package, "--run-dir", str(run_dir), "--parent", str(os.getpid())]
    with open(log or log_of(run_dir, role), "wb") as stderr:
        return subprocess.Popen(
            [*command, *arguments],
            stdin=stdin,
            stdout=stderr,
            stderr=stderr,
            env=child_environment(computes=role.startswith("execute")),
            start_new_session=True,
        )


def last_log_lines(run_dir: Path, role: str) -> str:
    """The last lines of the worker's log."""
    try:
        with open(log_of(run_dir, role), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - KEPT_STDERR_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-KEPT_STDERR_LINES:])
