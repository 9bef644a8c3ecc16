"""Workers of tests are forked from a process that has imported what they need.

Imports are most of what a start costs: of a pipeline 0.8 s of processor time, with torch 2 s. All else is as the driver
wants it, and the worker is a child of the test's own process; but workers of one process of tests share the seed of
Python's hashes. Where a test changes what processes inherit, such as the environment, a limit or an ignored signal, its
workers are started as outside of tests. So are those of other processes, such as ``triptych serve``, and all of them
with ``--ordinary-workers``.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fork_server import MAX_BYTES

PR_SET_CHILD_SUBREAPER = 36
WORKERS = [f"triptych.workers.{role}.process" for role in ("prepare", "execute", "summarize")]
TORCH = ["triptych.workers.execute.model.build"]
# Variables that may differ, as no import reads them. Tests have one thread in any case.
_FREE = {"PYTEST_CURRENT_TEST", "OPENBLAS_NUM_THREADS", "XDG_CACHE_HOME"}
_STATUS = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapEff", "NoNewPrivs", "Seccomp", "Cpus_allowed:")


@contextmanager
def forked_workers() -> Iterator[None]:
    """In here, drivers of this process have them."""
    from triptych.driver import processes
    from triptych.protocol.lifeline import child_environment

    forks = Forks(child_environment(computes=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "subprocess", SimpleNamespace(Popen=forks.popen))
        yield
    if left := forks.changes(child_environment(computes=True)):
        warnings.warn(f"tests have left something behind, and workers after them were not forked: {left}", stacklevel=1)
    forks.close()


@contextmanager
def forked_with_changes() -> Iterator[None]:
    """The same for a changed environment, if they are forked at all."""
    from triptych.driver import processes

    with nullcontext() if vars(processes)["subprocess"] is subprocess else forked_workers():
        yield


@contextmanager
def ordinary_workers() -> Iterator[None]:
    """In here, drivers start them as outside of tests."""
    from triptych.driver import processes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "subprocess", subprocess)
        yield


class Forks:
    """One server for workers that need torch and one for the others, each started when it is first needed."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment, self._inherited = environment, set(inherited(environment))
        self._servers: dict[bool, _Server] = {}
        self._lock = threading.Lock()  # each driver has a thread that starts workers

    def changes(self, environment: dict[str, str]) -> list[str]:
        """What a new process would inherit and its server did not, and the other way round."""
        return sorted(self._inherited.symmetric_difference(inherited(environment)))

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        with self._lock:
            if command[0] != sys.executable or self.changes(options["env"]):
                return subprocess.Popen(command, **options)
            return _Forked(self._server(needs_torch=_needs_torch(command)), command, **options)

    def _server(self, *, needs_torch: bool) -> _Server:
        if needs_torch not in self._servers:
            self._servers[needs_torch] = _Server(WORKERS + TORCH * needs_torch, self._environment)
        return self._servers[needs_torch]

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


class _Server:
    """See ``fork_server.py``."""

    def __init__(self, modules: list[str], environment: dict[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            file = theirs.fileno()
            command = [sys.executable, "-m", "tests.fork_server", str(file), *modules]
            self._process = subprocess.Popen(command, env=environment, pass_fds=[file], start_new_session=True)

    def fork(self, command: list[str], environment: dict[str, str], files: list[int]) -> int:
        """The process id of a new child of this process. ``files`` are its standard ones, and its working directory."""
        _, _, module, *arguments = command
        request = {"module": module, "arguments": arguments, "environment": environment}
        _adopt_orphans(True)
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)
            return int(self._channel.recv(MAX_BYTES))
        finally:
            _adopt_orphans(False)

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


class _Forked(subprocess.Popen[bytes]):
    """Only how the process is created differs."""

    def __init__(self, server: _Server, command: list[str], **options: Any) -> None:
        self._server = server
        super().__init__(command, **options)

    def _execute_child(self, args: list[str], *options: Any) -> None:  # in the order of Python 3.10 to 3.14
        cwd, environment, stdin, stdin_to_write, stdout, stderr = (options[i] for i in (4, 5, 9, 10, 12, 14))
        folder = os.open(cwd or ".", os.O_PATH)
        try:
            self.pid = self._server.fork(args, environment, [stdin, stdout, stderr, folder])
            self._child_created = True
        finally:
            os.close(folder)
            if stdin_to_write != -1 or stdin == getattr(self, "_devnull", None):
                os.close(stdin)


def _needs_torch(command: list[str]) -> bool:
    if ".execute" not in command[2]:
        return False
    run_dir = Path(command[command.index("--run-dir") + 1])
    return bool(json.loads((run_dir / "config.json").read_text())["model"]["model"] != "hash-lm")


def inherited(environment: dict[str, str]) -> Iterator[str]:
    """What a new process has from this thread and its environment, other than open files."""
    yield from Path("/proc/self/limits").read_text().splitlines()
    yield from (line for line in Path("/proc/thread-self/status").read_text().splitlines() if line.startswith(_STATUS))
    yield from (f"{name}={value}" for name, value in environment.items() if name not in _FREE)


def _adopt_orphans(is_on: bool) -> None:
    """Whether an orphan becomes a child of this process if an ancestor of it was one."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
