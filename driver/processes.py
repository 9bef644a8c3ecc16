"""A worker's process: how it is started, what is needed of it then, and its last log lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

from ..protocol.lifeline import child_environment

KEPT_STDERR_LINES = 60  # the stacks of some threads
KEPT_STDERR_BYTES = 1 << 16


def log_of(run_dir: Path, role: str) -> Path:
    """Where a worker writes its standard output and error."""
    return run_dir / f"{role}.log"


def open_cwd() -> int | None:
    """The working directory, open; None if it cannot be entered, as root's by a service with less rights."""
    try:
        return os.open(".", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None


class ForkedProcess:
    """A child of this process that another one has forked, with what ``subprocess.Popen`` has to control it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None, "it has ended"
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # the host program has waited for it, or ignores SIGCHLD
                pid, status = self.pid, 0
            if pid != 0:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"


def module_of(role: str) -> str:
    return f"{__package__.rpartition('.')[0]}.workers.{role}"


def common_arguments(run_dir: Path) -> list[str]:
    return ["--run-dir", str(run_dir), "--parent", str(os.getpid())]


def environment_of(role: str, run_dir: Path) -> dict[str, str]:
    return {**child_environment(computes=role.startswith("execute")), **_temporary_folder(run_dir)}


@contextmanager
def open_log(path: Path) -> Iterator[BinaryIO]:
    """The file, emptied; for appending, so that truncating it while the process runs frees its space."""
    with open(path, "ab", opener=partial(os.open, mode=0o600)) as log:
        log.truncate(0)
        yield log


def start_process(
    run_dir: Path, role: str, *, arguments: list[str], stdin: int, log: Path | None = None, cwd: int | None
) -> subprocess.Popen[bytes]:
    """Run ``python -m`` on a worker's module, in a new session; it is killed when the calling thread ends.

    ``cwd`` is its working directory, from ``open_cwd``: it may have been deleted. None: the current one.

    Raises:
        OSError: no process can be created, or no descriptor is left.
    """
    with open_log(log or log_of(run_dir, role)) as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", module_of(role), *common_arguments(run_dir), *arguments],
            cwd=None if cwd is None else f"/proc/self/fd/{cwd}",
            stdin=stdin,
            stdout=stderr,
            stderr=stderr,
            env=environment_of(role, run_dir),
            start_new_session=True,
        )


def why_not_started(error: OSError, run_dir: Path) -> str:
    """The reason for the error of ``start_process``."""
    if not run_dir.exists():
        return f"the run directory {run_dir} was deleted, as systemd-logind does when its user logs out (RemoveIPC)"
    reason = error.strerror or repr(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


def _temporary_folder(run_dir: Path) -> dict[str, str]:
    """Variables that make up for a missing folder for temporary files, without which torch cannot even be imported."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # only shared memory can be written, as in a container with a read-only file system
        return {"TMPDIR": str(run_dir)}
    return {}


def last_log_lines(run_dir: Path, role: str) -> str:
    """The last lines of the worker's log; why it cannot be read, such as for lack of a descriptor, if it cannot."""
    try:
        with open(log_of(run_dir, role), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - KEPT_STDERR_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:  # must not end the thread that restarts workers
        return f"(the log cannot be read: {error.strerror})"
    return "\n".join(text.splitlines()[-KEPT_STDERR_LINES:])
