"""A worker that was stopped before it was tied to its driver, and outlived it, ends with the next driver's start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.waiting import eventually
from triptych.driver.orphans import end_orphans
from triptych.protocol.lifeline import child_environment
from triptych.protocol.proc_stat import is_stopped

READS_ITS_INPUT = "import sys; sys.stdin.read()"


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that shows these words after its program, and ends when its input does."""
    command = [sys.executable, "-c", READS_ITS_INPUT, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=child_environment()) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def stopped(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    with running(*words) as process:
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(process.pid))
        yield process


def test_stopped_worker_of_a_driver_that_was_killed_is_ended() -> None:
    with stopped("-m", "triptych.workers.prepare", "--run-dir", "/nowhere", "--parent", "1") as worker:
        end_orphans()
        assert worker.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "triptych.workers.prepare", "--parent", str(os.getpid())),
        ("-m", "tripwire.workers.prepare", "--parent", "1"),
        ("-m", "triptych.workers.prepare"),
        ("-m",),
    ],
    ids=["a living driver's", "another program's", "started by hand", "no module"],
)
def test_other_stopped_process_is_left_alone(words: tuple[str, ...]) -> None:
    with stopped(*words) as process:
        end_orphans()
        assert is_stopped(process.pid)


def test_running_worker_is_left_alone() -> None:
    with running("-m", "triptych.workers.prepare", "--parent", "1") as worker:  # once stopped, other tests would end it
        end_orphans()
        worker.communicate(timeout=20)
        assert worker.returncode == 0
