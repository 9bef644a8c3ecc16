"""Killing a worker, and waiting until its successor works."""

from __future__ import annotations

import os
import signal

from tests.waiting import eventually
from triptych import Driver


def kill(driver: Driver, role: str) -> None:
    pid = eventually(lambda: driver.pids[role])
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: driver.pids[role] not in (None, pid))


def num_steps(driver: Driver) -> int:
    return int(driver.stats()["execute"].get("steps", 0))


def has_stepped(driver: Driver, before: int) -> bool:
    return num_steps(driver) != before
