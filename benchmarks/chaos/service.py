"""A separate ``triptych serve``, to be killed, stopped and restarted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from triptych.driver.control import ask
from triptych.protocol.board import ROLES, Board
from triptych.protocol.errors import ConfigError
from triptych.protocol.run_dir import board_path

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT / "tests" / "pipeline" / "faults"  # makes certain requests poisonous, see there
COMMAND = [sys.executable, "-c", "from triptych.launch.cli import main; main()", "serve"]


class Service:
    """One pipeline in one run directory, over any number of driver processes."""

    def __init__(self, run_dir: Path, flags: list[str]) -> None:
        self.run_dir = run_dir
        self._flags = flags
        self._log = open(run_dir.parent / "serve.log", "ab")  # noqa: SIM115, closed with the service
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        path = os.pathsep.join([str(FAULTS), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [*COMMAND, *self._flags, "--run-dir", str(self.run_dir)]
        self.process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log)

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        wait_for(self.is_ready, timeout_s)
        self.board = Board(board_path(self.run_dir))

    def is_ready(self) -> bool:
        try:
            return bool(ask(self.run_dir, "health")["status"] in ("ok", "degraded"))
        except ConfigError:
            return False

    def health(self) -> dict[str, Any]:
        return dict(ask(self.run_dir, "health"))

    def pid(self, role: str) -> int | None:
        """The worker's current process."""
        return self.pids().get(role)

    def pids(self) -> dict[str, int]:
        try:
            workers = self.health()["workers"]
        except ConfigError:
            return {}
        return {role: workers[role]["pid"] for role in ROLES if workers[role]["pid"] is not None}

    def send(self, role: str, number: int) -> bool:
        """Send a signal; returns whether the process existed."""
        pid = self.pid(role)
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def kill_fork_servers(self) -> int:
        """How many were killed."""
        assert self.process is not None
        num_killed = 0
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "triptych.workers.fork_server" in child.cmdline():
                    child.kill()
                    num_killed += 1
        return num_killed

    def kill_driver(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self, timeout_s: float = 90.0) -> int:
        """Send SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_s)
        self._log.close()
        return code

    def num_files(self) -> dict[str, int]:
        """Open file descriptors by role."""
        return {role: len(os.listdir(f"/proc/{pid}/fd")) for role, pid in self.pids().items()}


def wait_for(condition: Callable[[], object], timeout_s: float, *, interval_s: float = 0.005) -> float:
    """Seconds until the condition was true.

    Raises:
        TimeoutError: it was never true.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise TimeoutError(f"not true within {timeout_s} s")
        time.sleep(interval_s)
    return time.monotonic() - began
