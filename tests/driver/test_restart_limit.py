"""Restarts are limited: a worker that keeps failing is given up, with its last log lines in the error."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.driver.test_supervisor import is_replaced, pid_of, soon
from tests.waiting import eventually
from triptych import Driver
from triptych.driver import worker
from triptych.driver.blame import Blame
from triptych.driver.deaths import Death
from triptych.driver.supervisor import Supervisor
from triptych.protocol.board import STOP
from triptych.protocol.errors import ConfigError, WorkerDied
from triptych.protocol.run_dir import CONFIG_FILE
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens


def break_settings(run_dir: Path) -> None:
    """From now on, a worker that starts cannot read its settings."""
    (run_dir / CONFIG_FILE).write_text("{")


def test_worker_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    with Driver("hash-lm", run_dir=tmp_path, max_restarts=2, hash_step_ms=5) as driver:
        stream = driver.submit([5], max_tokens=4000)
        stream.accepted(20)
        break_settings(tmp_path)
        driver.restart("summarize")
        error = soon(lambda: error_of(driver))
        restarts = driver._started.supervisor.num_restarts if driver._started else {}
        health = driver.health()
    assert "JSONDecodeError" in health.workers["summarize"].last_death
    assert health.reason.startswith("worker summarize ended with exit code 1: ")
    assert "JSONDecodeError" in health.reason
    assert (error.role, error.exit_code, restarts["summarize"]) == ("summarize", 1, 4), (
        "one replacement requested, three failed"
    )
    assert "JSONDecodeError" in error.stderr
    assert stream.done


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM], ids=errno.errorcode.get)
def test_lack_of_processes_or_files_after_the_start_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Others may have them all: they belong to the user, the control group or the host program."""
    monkeypatch.setattr(worker, "SHORTAGE_S", 0.01)
    start, num_failures = Supervisor._start_process, itertools.count()

    def start_or_fail(supervisor: Supervisor, role: str, **options: Any) -> Any:
        if supervisor._was_ready and next(num_failures) < 10:
            raise OSError(number, os.strerror(number))
        return start(supervisor, role, **options)

    monkeypatch.setattr(Supervisor, "_start_process", start_or_fail)
    with Driver("hash-lm", run_dir=tmp_path, max_restarts=2, hash_step_ms=5) as driver:
        stream = driver.submit([5], max_tokens=200)
        stream.accepted(20)
        driver.restart("execute")
        assert stream.result(20).token_ids == expected_tokens([5], 200, VOCAB_SIZE)
        assert os.strerror(number) in driver.health().workers["execute"].last_death
        assert next(num_failures) > 10


def test_driver_that_gave_up_gives_the_reason_and_does_not_spin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, num_turns = Supervisor._turn, itertools.count()
    monkeypatch.setattr(Supervisor, "_turn", lambda supervisor: (next(num_turns), turn(supervisor)))
    with Driver("hash-lm", run_dir=tmp_path, max_restarts=0) as driver:
        break_settings(tmp_path)
        driver.restart("prepare")
        error = soon(lambda: error_of(driver))
        for use in (lambda: driver.submit([5]), driver.stats, lambda: driver.pids, lambda: driver.restart("prepare")):
            with pytest.raises(WorkerDied) as caught:
                use()
            assert caught.value is error
        before = next(num_turns)
        threading.Event().wait(0.5)
        assert next(num_turns) - before < 20


def test_stop_at_the_moment_a_worker_is_given_up_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAILED, written after STOP, kept the other workers running, so the stop waited for them for ever."""
    note_death, driver = Blame.note_death, Driver("hash-lm", max_restarts=0).start()
    stop = threading.Thread(target=driver.stop, kwargs={"mode": "abort"}, daemon=True)

    def stop_meanwhile(blame: Blame, death: Death) -> int:
        stop.start()
        eventually(lambda: blame._board.mode == STOP)
        return note_death(blame, death)

    monkeypatch.setattr(Blame, "note_death", stop_meanwhile)
    os.kill(pid_of(driver, "execute"), signal.SIGABRT)
    eventually(lambda: stop.ident)
    stop.join(20)
    assert not stop.is_alive()


def test_replacing_a_worker_that_is_given_up_fails_at_once(tmp_path: Path) -> None:
    with Driver("hash-lm", run_dir=tmp_path, max_restarts=0) as driver:
        break_settings(tmp_path)
        with pytest.raises(ConfigError, match="the new prepare does not start: worker prepare ended with exit code 1"):
            driver.replace("prepare", timeout=40)


def error_of(driver: Driver) -> WorkerDied | None:
    try:
        assert driver.pids
    except WorkerDied as error:
        return error
    return None


def test_kills_from_outside_and_too_many_clients_do_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Driver("hash-lm", run_dir=tmp_path, max_restarts=0) as driver:
        old = pid_of(driver, "prepare")
        os.kill(old, signal.SIGKILL)
        soon(lambda: is_replaced(driver, "prepare", old))
        caplog.clear()
        for _ in range(2):
            old = pid_of(driver, "prepare")
            last_words = "Too many open files (src/ipc_listener.cpp:297)\n"  # of ZeroMQ
            (tmp_path / "prepare.log").write_text(last_words)
            os.kill(old, signal.SIGABRT)
            soon(lambda old=old: is_replaced(driver, "prepare", old))  # type: ignore[misc]
        assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]  # told once, not every second
        assert driver.generate([5], max_tokens=3, timeout=20).token_ids == expected_tokens([5], 3, VOCAB_SIZE)


def test_repairing_the_settings_in_time_saves_the_pipeline(tmp_path: Path) -> None:
    with Driver("hash-lm", run_dir=tmp_path, max_restarts=50) as driver:
        settings = (tmp_path / CONFIG_FILE).read_text()
        old = pid_of(driver, "prepare")
        break_settings(tmp_path)
        driver.restart("prepare")
        soon(lambda: driver._started is not None and driver._started.supervisor.num_restarts["prepare"] >= 3)
        (tmp_path / CONFIG_FILE).write_text(settings)
        soon(lambda: is_replaced(driver, "prepare", old))
        assert driver.generate([5], max_tokens=3, timeout=20).token_ids == expected_tokens([5], 3, VOCAB_SIZE)


def test_worker_that_every_request_crashes_is_given_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each crash is blamed on a request, and yet continuing makes no sense."""
    monkeypatch.setattr(Blame, "note_death", lambda _, death: 2 if death.is_internal else 0)
    monkeypatch.setattr(worker, "MAX_EXPLAINED", 3)
    with Driver("hash-lm", run_dir=tmp_path, max_restarts=1) as driver:
        break_settings(tmp_path)
        driver.restart("prepare")
        assert soon(lambda: error_of(driver)).role == "prepare"
        assert driver._started is not None
        assert driver._started.supervisor.num_restarts["prepare"] == 1 + 3 + 1
