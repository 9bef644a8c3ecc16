"""The gateway's processes, supervised by ``serve``: one that dies or hangs is restarted.

All share one listening socket, which belongs to this process. Connections made while a gateway restarts wait in its
backlog, and are served. At a stop it is closed here too: in its backlog they would wait for the last process, in vain.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ....driver.orphans import end_orphans
from ....protocol.errors import ConfigError
from ....protocol.lifeline import ask_for_stacks, child_environment
from ....protocol.private_file import write_private
from ....protocol.starvation import Starvation
from ....protocol.threads import start_thread
from ..config import GatewayConfig
from ..settings import Settings
from .address import URL_FILE, listening, url_of
from .counters import forget_counts

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # how often to count a silence
START_S = 30.0  # until the first sign of life
HANG_S = 10.0  # without a sign of life before a gateway is killed
STOP_S = 8.0  # for a gateway to finish its connections
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.05, 5.0
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@contextmanager
def listening_for(config: GatewayConfig) -> Iterator[socket.socket | None]:
    """The socket for ``gateways``; None if no address is configured. What connects before they run waits for them.

    Raises:
        ConfigError: the address is not available, or a package that HTTP needs is not installed.
    """
    if config.http is None:
        yield None
        return
    check_installed()
    end_orphans()  # one of them may hold the address
    with listening(config.http) as listener:
        yield listener


@contextmanager
def gateways(
    config: GatewayConfig, listener: socket.socket | None, run_dir: Path, *, log_level: str
) -> Iterator[str | None]:
    """HTTP for the pipeline in ``run_dir`` inside this block; yields its URL, or None without a ``listener``, which is
    closed at the end.

    Raises:
        ConfigError: no thread can be started.
    """
    if listener is None:
        yield None
        return
    url = url_of(listener, is_tls=config.is_tls)
    write_private(run_dir / URL_FILE, url)
    forget_counts(run_dir)
    running = [
        _Process(config, run_dir, index=index, listener=listener, log_level=log_level)
        for index in range(config.http_workers)
    ]
    try:
        for process in running:
            start_thread(process)
        yield url
    finally:
        for process in running:
            process.begin_stop()
        listener.close()
        for process in running:
            if process.ident is not None:
                process.join()


def check_installed() -> None:
    """
    Raises:
        ConfigError: a package of the extra ``http`` is missing.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"http needs {', '.join(missing)}: pip install 'triptych[http]'", param="http")


class _Process(threading.Thread):
    """One gateway process at a time, in a thread of its own: Linux ties PR_SET_PDEATHSIG to the thread that started the
    child.
    """

    def __init__(
        self, config: GatewayConfig, run_dir: Path, *, index: int, listener: socket.socket, log_level: str
    ) -> None:
        super().__init__(name=f"triptych-gateway-{index}", daemon=True)
        self._config, self._run_dir, self._index = config, run_dir, index
        self._listener, self._log_level = listener, log_level
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def begin_stop(self) -> None:
        self._stopping.set()
        if (process := self._process) is not None:
            process.send_signal(signal.SIGTERM)

    def run(self) -> None:
        back_off_s = FIRST_BACK_OFF_S
        while not self._stopping.is_set():
            began = time.monotonic()
            end = self._run_one()
            if self._stopping.is_set():
                return
            lasted_s = time.monotonic() - began
            back_off_s = FIRST_BACK_OFF_S if lasted_s > START_S else min(MAX_BACK_OFF_S, 2 * back_off_s)
            logger.warning("gateway %d %s; restarting it in %.2f s", self._index, end, back_off_s)
            self._stopping.wait(back_off_s)

    def _run_one(self) -> str:
        """Start one, wait for its end, and describe that."""
        try:
            return f"ended with exit code {self._run_process()}"
        except OSError as error:  # out of memory, processes or files, for the moment
            return f"cannot be started: {error.strerror}"

    def _run_process(self) -> int:
        pulse, childs_end = os.pipe2(os.O_CLOEXEC)
        try:
            process = self._start(childs_end)
        except BaseException:
            os.close(pulse)
            raise
        finally:
            os.close(childs_end)
        try:
            if self._stopping.is_set():  # the signal may have missed this process
                process.send_signal(signal.SIGTERM)
            self._watch(process, pulse)
            return process.wait()
        finally:
            os.close(pulse)

    def _start(self, childs_end: int) -> subprocess.Popen[bytes]:
        os.set_blocking(childs_end, False)
        if (listen_fd := self._listener.fileno()) < 0:
            raise OSError(errno.EBADF, "the socket is closed")  # by a stop that came after the last look
        settings = Settings(
            config=self._config, run_dir=self._run_dir, index=self._index, listen_fd=listen_fd,
            heartbeat_fd=childs_end, log_level=self._log_level,
        )  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", __package__.rpartition(".")[0], "--supervised", "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(listen_fd, childs_end),
            env=child_environment(),
            start_new_session=True,
        )
        self._process = process
        assert process.stdin is not None, "stdin is a pipe"
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(settings.to_json().encode())
        return process

    def _watch(self, process: subprocess.Popen[bytes], pulse: int) -> None:
        """Return when the process has ended; kill it if it is silent for too long through its own fault."""
        silent_s, patience_s, stop_at, starvation = 0.0, START_S, math.inf, Starvation()
        poll = select.poll()  # any number of files may be open here
        poll.register(pulse, select.POLLIN)
        while True:
            if self._stopping.is_set():
                stop_at = min(stop_at, time.monotonic() + STOP_S)
            ready = poll.poll(LOOK_S * 1000)
            if ready and not os.read(pulse, 4096):
                return
            if ready:
                silent_s, patience_s = 0.0, HANG_S
            else:  # looks, not the clock: in a paused container both processes stand still
                silent_s += LOOK_S
            if time.monotonic() >= stop_at:
                why = f"did not stop within {STOP_S:.0f} s"
            elif silent_s - starvation.of(process.pid, silent_s, patience_s) > patience_s:
                why = f"showed no sign of life for {silent_s:.0f} s"
            else:
                continue
            logger.warning("gateway %d %s: killing it", self._index, why)
            ask_for_stacks(process)
            process.kill()
            return
