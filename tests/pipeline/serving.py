"""A driver in its own process, for tests that kill it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.proc import children_of, is_alive
from tests.waiting import eventually
from triptych.driver.control import ask
from triptych.protocol.errors import ConfigError

CODE = """
import json, sys, threading
from triptych import Driver
driver = Driver(run_dir=sys.argv[1], **json.loads(sys.argv[2])).start()
threading.Event().wait()
"""


class DriverProcess:
    """Started with a run directory and options; killed at the end of its test at the latest."""

    def __init__(self, run_dir: Path, *, max_files: int | None = None, **options: Any) -> None:
        """``max_files`` is the limit of open files for the driver and each worker."""
        self.run_dir = run_dir
        limit = [] if max_files is None else ["prlimit", f"--nofile={max_files}:{max_files}"]
        command = [*limit, sys.executable, "-c", CODE, str(run_dir), json.dumps(options)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def wait_ready(self, timeout: float = 60.0) -> None:
        eventually(self._is_ready, timeout=timeout)

    def _is_ready(self) -> bool:
        try:
            return bool(ask(self.run_dir, "health")["status"] == "ok")
        except ConfigError:
            return False

    def workers(self) -> list[int]:
        return children_of(self.process.pid)

    def kill(self) -> None:
        """kill -9; its workers die with it."""
        workers = self.workers()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        eventually(lambda: not any(map(is_alive, workers)))

    def __enter__(self) -> DriverProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
