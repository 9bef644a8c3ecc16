"""Drivers of tests share the processes that fork their workers.

Imports are most of what a start costs: of a pipeline 0.8 s of processor time, with torch 2 s. Outside of tests each
driver has fork servers of its own; here those of one process of tests have the same, for as long as it lives. Where a
test changes what processes inherit, such as the environment, the working directory, a limit or an ignored signal, its
workers are started as without fork servers. Other processes, such as ``triptych serve``, have their own, and so have
all with ``--own-servers``.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from triptych.driver import supervisor
from triptych.driver.fork_servers import ForkServer, ForkServers
from triptych.driver.processes import ForkedProcess, last_log_lines
from triptych.protocol.board import ROLES
from triptych.protocol.config import HASH_MODEL, PipelineConfig
from triptych.protocol.lifeline import child_environment
from triptych.protocol.run_dir import CONFIG_FILE, read_config

# Variables that may differ, as no import reads them.
_FREE = {"PYTEST_CURRENT_TEST", "OPENBLAS_NUM_THREADS", "XDG_CACHE_HOME"}
_STATUS = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapEff", "NoNewPrivs", "Seccomp", "Cpus_allowed:")


@contextmanager
def shared_servers() -> Iterator[None]:
    """In here, drivers of this process have them."""
    with ThreadPoolExecutor(1) as starter, TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        shared = Shared(Path(folder), starter)
        patch.setattr(supervisor, "ForkServers", partial(SharedServers, shared))
        yield
        if left := shared.changes():
            text = f"tests have left something behind, and workers after them were not forked: {left}"
            warnings.warn(text, stacklevel=1)
        shared.close()


@contextmanager
def shared_with_changes() -> Iterator[None]:
    """The same for a changed environment, if they are shared at all."""
    with nullcontext() if vars(supervisor)["ForkServers"] is ForkServers else shared_servers():
        yield


@contextmanager
def own_servers() -> Iterator[None]:
    """In here, drivers have their own as outside of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "ForkServers", ForkServers)
        yield


class Shared:
    """One server for workers that need torch and one for the others, each started when it is first needed."""

    def __init__(self, folder: Path, starter: ThreadPoolExecutor) -> None:
        """``starter``: with its thread, they end."""
        self._folder, self._starter, self._inherited = folder, starter, set(inherited())
        self._servers: dict[bool, LockedServer] = {}
        self._lock = threading.Lock()  # each driver has a thread that starts workers

    def changes(self) -> list[str]:
        """What a new process would inherit and its server did not, and the other way round."""
        return sorted(self._inherited.symmetric_difference(inherited()))

    def server(self, *, needs_torch: bool) -> ForkServer | None:
        with self._lock:
            if self.changes():
                return None
            server = self._servers.get(needs_torch)
            if server is None or server.has_failed:
                server = self._servers[needs_torch] = self._starter.submit(self._start, needs_torch).result()
            return server

    def _start(self, needs_torch: bool) -> LockedServer:
        run_dir = self._folder / ("with-torch" if needs_torch else "without") / ("long-enough-for-any-other" * 4)
        run_dir.mkdir(parents=True, exist_ok=True)
        config = PipelineConfig.from_options(model="demo" if needs_torch else HASH_MODEL)
        (run_dir / CONFIG_FILE).write_text(config.to_json())
        server = LockedServer(run_dir, ("execute",) if needs_torch else ROLES, cwd=None)
        assert server.receive(), last_log_lines(run_dir, server.log)
        return server

    def close(self) -> None:
        for server in self._servers.values():
            if not server.has_failed:
                server.end()


class LockedServer(ForkServer):
    """One that several threads may use."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._lock, self.has_failed = threading.Lock(), False

    def fork(self, *arguments: Any) -> ForkedProcess | None:
        with self._lock:
            forked = None if self.has_failed else super().fork(*arguments)
            if forked is None and not self.has_failed:  # as where it did not answer: the next test gets another
                self.has_failed = True
                self.end()
            return forked


class SharedServers(ForkServers):
    """Those of one driver."""

    def __init__(self, shared: Shared, run_dir: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(run_dir, *arguments, **options)
        self._shared, self._is_on = shared, False

    def start(self) -> None:
        """Each is started when it is first needed."""
        self._is_on = True

    def are_due(self) -> bool:
        return False

    def is_coming(self, role: str) -> bool:
        return False

    def _server_of(self, role: str) -> ForkServer | None:
        if not self._is_on:
            return None
        needs_torch = role == "execute" and read_config(self._run_dir).model.model != HASH_MODEL
        return self._shared.server(needs_torch=needs_torch)


def inherited() -> Iterator[str]:
    """What a new process has from this thread, other than open files."""
    yield from Path("/proc/self/limits").read_text().splitlines()
    yield from (line for line in Path("/proc/thread-self/status").read_text().splitlines() if line.startswith(_STATUS))
    yield from (f"{name}={value}" for name, value in child_environment().items() if name not in _FREE)
    with suppress(OSError):  # it may have been deleted
        yield os.getcwd()
