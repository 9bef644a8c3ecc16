"""Spare processes."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.pipeline.checks import expected
from tests.waiting import eventually
from triptych import Driver
from triptych.driver.spares import Spares
from triptych.protocol.board import ROLES

pytestmark = pytest.mark.usefixtures("ordinary_workers")


def spares(driver: Driver) -> list[psutil.Process]:
    workers = {pid for pid in driver.pids.values() if pid}
    return [p for p in psutil.Process().children() if p.pid not in workers and "--spare" in p.cmdline()]


def has_imported(process: psutil.Process, library: str) -> bool:
    return any(library in each.path for each in process.memory_maps())


def startup_s(driver: Driver, role: str) -> float:
    return float(sum(driver.stats()[role].get("startup_s", {}).values()))


def test_spare_takes_over_and_is_replaced() -> None:
    with Driver("hash-lm", hash_step_ms=1.0, lease_s=30.0, spares=True) as driver:
        run_dir = driver.run_dir
        stream = driver.submit([4, 2], max_tokens=2000)
        for role in ROLES:
            eventually(lambda: len(spares(driver)) == len(ROLES))
            waiting = {p.pid for p in spares(driver)}
            old, killed = driver.pids[role], time.monotonic()
            assert old is not None
            os.kill(old, signal.SIGKILL)
            eventually(lambda role=role, old=old: driver.pids[role] not in (None, old))  # type: ignore[misc]
            assert driver.pids[role] in waiting
            eventually(lambda: driver.healthy)
            took_s = time.monotonic() - killed  # its time as a spare is no part of its start
            eventually(lambda role=role, took_s=took_s: 0 < startup_s(driver, role) < took_s)  # type: ignore[misc]
        assert stream.result(60).token_ids == expected([4, 2], 2000)
        eventually(lambda: len(spares(driver)) == len(ROLES))
        left = spares(driver)
        [prepare] = (process for process in left if "triptych.workers.prepare" in process.cmdline())
        eventually(lambda: has_imported(prepare, "markupsafe"))  # of jinja2, for the first chat
    assert not any(p.is_running() for p in left)
    assert not Path(run_dir).exists()


def test_dead_spare_does_not_prevent_a_restart() -> None:
    """Nor does it raise SIGPIPE, by which many programs let themselves be ended."""
    with Driver("hash-lm", spares=True) as driver:
        eventually(lambda: len(spares(driver)) == len(ROLES))
        for process in (waiting := spares(driver)):
            process.kill()
        eventually(lambda: all(process.status() == psutil.STATUS_ZOMBIE for process in waiting))
        pipes: list[int] = []
        before = signal.signal(signal.SIGPIPE, lambda number, _: pipes.append(number))
        try:
            for role in ROLES:
                driver.replace(role)
        finally:
            signal.signal(signal.SIGPIPE, before)
        assert pipes == []
        assert driver.generate([1, 2], max_tokens=3).token_ids == expected([1, 2], 3)


def test_spare_that_cannot_be_started_does_not_prevent_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(Spares, "fill", fail)
    with Driver("hash-lm", spares=True) as driver:
        assert failed.wait(20)
        driver.replace("prepare")
        assert driver.generate([1, 2], max_tokens=3).token_ids == expected([1, 2], 3)
        assert driver.health().status == "ok"
