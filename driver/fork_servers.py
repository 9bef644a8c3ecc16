"""Workers are forked from processes that have done their imports, which are most of what a start takes.

Such a *fork server* (``workers/fork_server.py``) has one thread, and each worker that it forks is a child of this
process: it depends on the server no more. Without a server, a worker is started in the ordinary way.
"""

from __future__ import annotations

import json
import logging
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..protocol.lifeline import FORK, GO, READY
from ..protocol.proc_stat import is_stopped
from ..protocol.system_calls import memfd_create
from .processes import (
    ForkedProcess,
    common_arguments,
    environment_of,
    last_log_lines,
    log_of,
    module_of,
    open_log,
    start_process,
)

logger = logging.getLogger(__name__)

GROUPS = (("execute",), ("prepare", "summarize"))  # roles that share a server: only execute needs torch
FORK_S = 1.0  # how long a server may take for it; on a busy machine it takes 0.04, and 0.15 at most
IMPORT_S = 60.0  # how long a worker waits for a server, as its own imports would take as long as the server's
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 60.0  # until a server is started in place of one that has ended
SETTLED_S = 10.0  # one that has lasted longer does not end again and again
_SERVER = "fork_server"  # the module


class ForkServer:
    """One process that forks workers of some roles, once its imports are done."""

    def __init__(self, run_dir: Path, roles: tuple[str, ...], *, cwd: int | None) -> None:
        """Start it. It ends with the calling thread.

        Raises:
            OSError: no process can be created, or no descriptor is left.
        """
        self.roles, self.log, arguments = roles, f"{_SERVER}.{roles[0]}", ["--roles", *roles]
        self.is_ready, self.started_at = False, time.monotonic()
        # Packets, so that none is read in part.
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = start_process(
                    run_dir, _SERVER, arguments=arguments, stdin=theirs.fileno(), log=log_of(run_dir, self.log), cwd=cwd
                )
        except OSError:
            self.channel.close()
            raise

    @property
    def is_importing(self) -> bool:
        is_late = time.monotonic() - self.started_at > IMPORT_S
        return not (self.is_ready or is_late or is_stopped(self._process.pid))

    def receive(self) -> bool:
        """Wait for a message. Whether the server is ready; otherwise it has ended."""
        with suppress(OSError):
            self.is_ready = self.channel.recv(len(READY)) == READY
            return self.is_ready
        return False

    def fork(self, words: list[str], environment: dict[str, str], files: list[int]) -> ForkedProcess | None:
        """A process that runs ``python -m`` with these words, and has its standard input and log in ``files``.

        None if there is none.

        Raises:
            OSError: no descriptor is left.
        """
        self._reap_unknown()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, open(memfd_create("request"), "w") as file:
            json.dump([words, environment], file)
            file.flush()
            file.seek(0)  # for the reader, too: the position is that of the file
            with theirs, suppress(OSError):  # the server has ended
                socket.send_fds(self.channel, [FORK], [*files, theirs.fileno(), file.fileno()])
            return self._await_greeting(ours)

    def _await_greeting(self, worker: socket.socket) -> ForkedProcess | None:
        """What a new process says first, by which it is known; it does nothing before it gets an answer.

        Its end is closed when neither the server nor a new process has it: then there is no new one, and never will be.
        """
        worker.settimeout(FORK_S)
        try:
            greeting = worker.recv(32)
        except TimeoutError:
            logger.warning("the fork server of %s does not answer: killing it", " and ".join(self.roles))
            os.killpg(self._process.pid, signal.SIGKILL)  # and a new process that was stopped: it is of this group
            return None
        if not greeting:
            return None
        with suppress(OSError):  # it has just ended, as any worker may
            worker.send(GO)
        return ForkedProcess(int(greeting))

    def end(self) -> int:
        """Its exit code."""
        self.channel.close()
        self._process.kill()
        code = self._process.wait()
        deadline = time.monotonic() + FORK_S
        while self._reap_unknown() and time.monotonic() < deadline:  # what was killed takes a moment to end
            time.sleep(0.001)
        return code

    def _reap_unknown(self) -> bool:
        """Take the exit codes of processes that ended before they were known: until then they are of this group.

        Whether others of it have not ended.
        """
        self._process.poll()  # not that of the server, which is another's to take
        with suppress(ChildProcessError):
            while os.waitpid(-self._process.pid, os.WNOHANG)[0]:
                pass
            return True
        return False


class ForkServers:
    """At most one server for each group of roles. All of it in the supervisor's thread."""

    def __init__(
        self, run_dir: Path, selector: selectors.BaseSelector, *, cwd: int | None, on_end: Callable[[int], object]
    ) -> None:
        """``selector`` gets a function to call for each server. ``on_end`` is called with the exit code of one."""
        self._run_dir, self._selector, self._cwd, self._on_end = run_dir, selector, cwd, on_end
        self._servers: dict[tuple[str, ...], ForkServer] = {}
        self._start_at = dict.fromkeys(GROUPS, 0.0)
        self._retry_s = dict.fromkeys(GROUPS, FIRST_RETRY_S)

    def are_due(self) -> bool:
        now = time.monotonic()
        return any(now >= self._start_at[group] for group in GROUPS if group not in self._servers)

    def start(self) -> None:
        """Start those that are due."""
        for group in GROUPS:
            if group in self._servers or time.monotonic() < self._start_at[group]:
                continue
            try:
                server = self._servers[group] = ForkServer(self._run_dir, group, cwd=self._cwd)
            except OSError as error:
                self._start_at[group] = time.monotonic() + MAX_RETRY_S
                logger.warning("no fork server could be started: %s", error)
                return
            self._selector.register(server.channel, selectors.EVENT_READ, partial(self._receive, server))

    def is_coming(self, role: str) -> bool:
        """Whether to wait for a server of this role."""
        server = self._server_of(role)
        return server is not None and server.is_importing

    def fork(self, role: str, *, arguments: list[str], stdin: int) -> ForkedProcess | None:
        """A new process of this role; None if there is no server that can fork it now."""
        server = self._server_of(role)
        if server is None or not server.is_ready:
            return None
        words = [module_of(role), *common_arguments(self._run_dir), *arguments]
        with suppress(OSError), open_log(log_of(self._run_dir, role)) as log:
            return server.fork(words, environment_of(role, self._run_dir), [stdin, log.fileno()])
        return None

    def close(self) -> None:
        for server in self._servers.values():
            server.end()
        self._servers.clear()

    def _server_of(self, role: str) -> ForkServer | None:
        return next((server for group, server in self._servers.items() if role in group), None)

    def _receive(self, server: ForkServer) -> None:
        took_s = time.monotonic() - server.started_at
        if server.receive():
            logger.info("the fork server of %s is ready after %.1f s", " and ".join(server.roles), took_s)
            return
        self._selector.unregister(server.channel)
        del self._servers[server.roles]
        code = server.end()
        self._plan_retry(server.roles, code, lasted_s=took_s)
        log = last_log_lines(self._run_dir, server.log)
        logger.warning("the fork server of %s has ended (exit code %d): %s", " and ".join(server.roles), code, log)
        self._on_end(code)

    def _plan_retry(self, roles: tuple[str, ...], code: int, *, lasted_s: float) -> None:
        """One that ends by itself, rather than by a signal, would do so again."""
        if lasted_s > SETTLED_S:
            self._retry_s[roles] = FIRST_RETRY_S
        self._start_at[roles] = math.inf if code > 0 else time.monotonic() + self._retry_s[roles]
        self._retry_s[roles] = min(2 * self._retry_s[roles], MAX_RETRY_S)
