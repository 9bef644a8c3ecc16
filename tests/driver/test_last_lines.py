"""A worker that crashes or hangs shows where it was: the driver logs it, as the next process overwrites its log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.waiting import eventually
from triptych import Driver
from triptych.driver.worker import Worker
from triptych.protocol.lifeline import SHOW_STACKS

HANGING = f"import faulthandler, time; faulthandler.register({SHOW_STACKS}); print(flush=True); time.sleep(3600)"


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with Driver("hash-lm", hang_s=0.5) as driver:
        yield driver


def replace_by(driver: Driver, number: signal.Signals) -> None:
    """Send summarize a signal that ends it, and wait for the next one."""
    old = eventually(lambda: driver.pids["summarize"])
    assert old is not None
    os.kill(old, number)
    eventually(lambda: driver.pids["summarize"] not in (None, old) and driver.healthy, timeout=60.0)


def test_stacks_of_a_crashed_worker_are_logged(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    replace_by(driver, signal.SIGSEGV)
    assert "the last lines of summarize were:\nFatal Python error: Segmentation fault" in caplog.text
    assert "workers/summarize/process.py" in caplog.text


def test_kill_from_outside_has_nothing_to_show(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    replace_by(driver, signal.SIGKILL)
    assert "the last lines of summarize" not in caplog.text


def test_hung_worker_shows_where_it_is_before_it_is_killed() -> None:
    command = [sys.executable, "-c", HANGING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        worker = Worker("execute", process)
        worker.kill_hung()
        _, errors = process.communicate(timeout=20)
    assert (worker.hung, worker.killed, process.returncode) == (True, True, -signal.SIGKILL)
    assert b'File "<string>", line 1 in <module>' in errors


def test_suspended_worker_is_killed_without_blame() -> None:
    with subprocess.Popen(["sleep", "3600"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        worker = Worker("execute", process)
        worker.kill_hung()
    assert (worker.hung, worker.killed, process.returncode) == (False, True, -signal.SIGKILL)
