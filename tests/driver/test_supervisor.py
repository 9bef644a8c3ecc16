"""A worker that dies or hangs is restarted; a failed start ends with the worker's last log lines."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually
from triptych import Driver
from triptych.driver import driver as driver_module
from triptych.driver import replacing
from triptych.driver import supervisor as supervisor_module
from triptych.driver.processes import last_log_lines, log_of, open_cwd
from triptych.driver.supervisor import Supervisor
from triptych.driver.worker import Worker
from triptych.protocol import starvation
from triptych.protocol.board import ROLES, STOP, Board
from triptych.protocol.config import PipelineConfig
from triptych.protocol.errors import ConfigError, PipelineClosed, WorkerDied
from triptych.protocol.journal.layout import Journal
from triptych.protocol.model_card import CARD_FILE
from triptych.protocol.run_dir import CONFIG_FILE, JOURNAL_FILE, board_path
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens

HANG_S = 0.5
soon = partial(eventually, timeout=60.0)  # a process starts in half a second, but much slower on a busy machine


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with Driver("hash-lm", hash_step_ms=1) as driver:
        yield driver


def pid_of(driver: Driver, role: str) -> int:
    pid = eventually(lambda: driver.pids[role])
    assert pid is not None
    return pid


def is_replaced(driver: Driver, role: str, old: int) -> bool:
    return driver.pids[role] not in (None, old) and driver.healthy


def run_before(run_dir: Path) -> Path:
    """The model card of a run directory in which a similar pipeline ran before."""
    (run_dir / CONFIG_FILE).write_text(PipelineConfig.from_options(model="hash-lm").to_json())
    return run_dir / CARD_FILE


def test_health_reports_a_journal_that_could_not_be_flushed(driver: Driver) -> None:
    journal = Journal.open(driver.run_dir / JOURNAL_FILE)
    soon(lambda: driver.health().status == "ok")
    journal.header["has_failed"] = 1  # as the flushing thread does
    try:
        health = driver.health()
        assert (health.status, driver.healthy) == ("degraded", True)
        assert health.reason.startswith(f"{journal.path} could not be written")
    finally:
        journal.header["has_failed"] = 0


def test_files_of_the_run_directory_are_readable_by_their_owner_only(driver: Driver) -> None:
    """The folder's mode keeps others out as well."""
    files = [path for path in driver.run_dir.iterdir() if path.is_file()]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: "0o600" for path in files}
    assert {f"{role}.log" for role in ROLES} <= {path.name for path in files}


@pytest.mark.parametrize("role", ROLES)
def test_worker_can_be_replaced_while_it_works(driver: Driver, role: str) -> None:
    stream = driver.submit([5, 6, 7], max_tokens=400)
    next(iter(stream))
    old = pid_of(driver, role)
    driver.restart(role)
    soon(lambda: is_replaced(driver, role, old))
    assert stream.result(30).token_ids == expected_tokens([5, 6, 7], 400, VOCAB_SIZE)


def test_replacement_works_in_the_folder_in_which_the_driver_was_started(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the paths of its config may be relative to, wherever the host program is now."""
    old, started_in = pid_of(driver, "prepare"), Path.cwd()
    monkeypatch.chdir(tmp_path)
    driver.restart("prepare")
    soon(lambda: is_replaced(driver, "prepare", old))
    assert Path(f"/proc/{pid_of(driver, 'prepare')}/cwd").readlink() == started_in


def test_driver_may_be_started_in_a_directory_that_it_may_not_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by sudo -u in the home of root."""

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        cwd = open_cwd()
    assert cwd is None


def test_replacement_is_counted_and_a_new_epoch_even_if_nobody_reads_the_log(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then rich's handler of logs raises SystemExit, in whichever thread writes a line."""
    monkeypatch.setattr(supervisor_module.logger, "info", lambda *_: sys.exit(1))
    before = driver.stats()
    old = pid_of(driver, "prepare")
    driver.restart("prepare")
    soon(lambda: is_replaced(driver, "prepare", old))
    after = driver.stats()
    assert after["prepare"]["epoch"] == before["prepare"]["epoch"] + 1
    assert after["restarts"]["prepare"] == before["restarts"]["prepare"] + 1


def test_replacement_whose_settings_cannot_be_written_keeps_the_model(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_nothing(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(replacing, "write_private", write_nothing)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        driver.replace("execute", model="demo")
    assert driver.config.model.model == "hash-lm"


@pytest.mark.parametrize(("num_explained", "is_at_once"), [(0, False), (2, True)])
def test_worker_whose_death_is_explained_is_started_at_once(
    driver: Driver, num_explained: int, is_at_once: bool
) -> None:
    """Whatever it died of before: the request that ended it is refused from then on."""
    assert driver._started is not None
    worker, error = Worker("execute"), WorkerDied("execute", -6, "")
    for _ in range(5):
        worker.note_death(time.monotonic(), error, num_explained=0)
    driver._started.supervisor._plan_restart(worker, error, internal=True, num_explained=num_explained)
    assert (worker.start_at == worker.all_deaths[-1]) is is_at_once


def test_replacing_an_unknown_role_is_refused(driver: Driver) -> None:
    with pytest.raises(ConfigError, match="role is 'driver', known are: prepare, execute, summarize"):
        driver.restart("driver")


def test_workers_ignore_a_ctrl_c_meant_for_the_driver(driver: Driver) -> None:
    before = dict(driver.pids)
    for pid in before.values():
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert driver.generate([5, 6], max_tokens=3, timeout=20).token_ids == expected_tokens([5, 6], 3, VOCAB_SIZE)
    assert driver.pids == before


@pytest.fixture(scope="module")
def fast_repeats() -> Iterator[Driver]:
    with Driver("hash-lm", hang_s=HANG_S) as driver:
        yield driver


@pytest.mark.parametrize("role", ROLES)
def test_hanging_worker_is_replaced_in_time(fast_repeats: Driver, role: str) -> None:
    old = pid_of(fast_repeats, role)
    os.kill(old, signal.SIGSTOP)
    stopped = time.monotonic()
    eventually(lambda: fast_repeats.pids[role] != old)
    noticed_s = time.monotonic() - stopped
    soon(lambda: is_replaced(fast_repeats, role, old))
    assert fast_repeats.generate([5, 6], max_tokens=3, timeout=20).token_ids == expected_tokens([5, 6], 3, VOCAB_SIZE)
    assert noticed_s < HANG_S + 1


def test_worker_without_processor_time_is_waited_for(fast_repeats: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an overloaded machine. If it were killed, it would only have to start again there."""
    role, old = "prepare", pid_of(fast_repeats, "prepare")
    with monkeypatch.context() as patch:
        patch.setattr(starvation, "run_delays", lambda pid: {1: time.monotonic_ns()})
        os.kill(old, signal.SIGSTOP)
        eventually(lambda: fast_repeats.health().workers[role].since_progress_s > 3 * HANG_S)
        assert fast_repeats.pids[role] == old
    soon(lambda: is_replaced(fast_repeats, role, old))


def test_worker_stopped_by_a_signal_while_it_starts_is_replaced_too(fast_repeats: Driver) -> None:
    """The length of a start is unknown, but a stopped process never finishes it."""
    role, old = "summarize", pid_of(fast_repeats, "summarize")
    os.kill(old, signal.SIGKILL)
    starting = eventually(lambda: pid if (pid := fast_repeats.pids[role]) not in (None, old) else None)
    assert starting is not None
    os.kill(starting, signal.SIGSTOP)
    assert fast_repeats.phases[role][0] != "ready"
    soon(lambda: is_replaced(fast_repeats, role, starting))
    assert fast_repeats.generate([5, 6], max_tokens=3, timeout=20).token_ids == expected_tokens([5, 6], 3, VOCAB_SIZE)


def test_missing_model_is_named() -> None:
    with pytest.raises(WorkerDied, match="/nonexistent") as caught:
        Driver("/nonexistent").start()
    assert (caught.value.role, caught.value.exit_code) == ("execute", 1)


def test_start_timeout_names_the_late_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "CLEAN_STOP_S", 0.1)
    os.mkfifo(run_before(tmp_path))  # opening it blocks
    with pytest.raises(WorkerDied, match=r"was stuck; .*\n\(it was not ready in time\)"):
        Driver("hash-lm", run_dir=tmp_path, start_timeout_s=1.0).start()


def test_stop_kills_no_worker_that_waits_for_a_processor_and_none_is_replaced_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver("hash-lm").start()
    assert driver._started is not None
    supervisor = driver._started.supervisor
    monkeypatch.setattr(driver_module, "CLEAN_STOP_S", 0.001)
    monkeypatch.setattr(starvation, "run_delays", lambda pid: {pid: time.monotonic_ns()})
    assert driver.stop(mode="abort") == {"prepare": 0, "execute": 0, "summarize": 0}
    supervisor.restart("prepare")


def test_stop_does_not_wait_for_a_worker_that_is_still_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "CLEAN_STOP_S", 600.0)
    os.mkfifo(run_before(tmp_path))  # opening it blocks
    driver = Driver("hash-lm", run_dir=tmp_path).start(wait=False)
    eventually(lambda: driver.phases["execute"][0] == "loading")
    assert driver.stop(mode="abort")["execute"] == -signal.SIGKILL


def test_waiting_start_ends_when_another_thread_stops_the_driver(tmp_path: Path) -> None:
    os.mkfifo(run_before(tmp_path))  # opening it blocks
    driver = Driver("hash-lm", run_dir=tmp_path)
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(driver.start)
        eventually(lambda: driver._started is not None and driver.phases["execute"][0] == "loading")
        driver.stop(mode="abort")
        assert isinstance(start.exception(20), PipelineClosed)


def test_failed_start_shows_the_traceback_and_leaves_nothing(tmp_path: Path) -> None:
    card = run_before(tmp_path)
    card.write_text("{")
    driver = Driver("hash-lm", run_dir=tmp_path)
    with pytest.raises(WorkerDied, match="Traceback") as caught:
        driver.start()
    assert (caught.value.role, caught.value.exit_code) == ("execute", 1)
    assert "JSONDecodeError" in caught.value.stderr
    card.unlink()
    with driver:
        assert driver.healthy


def test_worker_that_exits_before_the_supervisor_notices_the_stop_is_not_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Driver("hash-lm") as driver:
        board = Board(board_path(driver.run_dir))
        board.set_mode(STOP)
        soon(lambda: driver.pids == dict.fromkeys(ROLES))
        board.close()
    assert "restarting it" not in caplog.text


def test_process_that_cannot_be_started_now_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, errors = Supervisor._start_process, [BlockingIOError(errno.EAGAIN, "no process left") for _ in range(3)]

    def start_or_fail(supervisor: Supervisor, role: str, **options: Any) -> Any:
        if role == "prepare" and errors:
            raise errors.pop()
        return start(supervisor, role, **options)

    monkeypatch.setattr(Supervisor, "_start_process", start_or_fail)
    with Driver("hash-lm", run_dir=tmp_path) as driver:
        assert not errors
        health = driver.health().workers["prepare"]
        assert (health.recent_deaths, "no process left" in health.last_death) == (3, True)
        assert driver.generate([5], max_tokens=3, timeout=20).token_ids == expected_tokens([5], 3, VOCAB_SIZE)


def test_log_that_cannot_be_read_does_not_end_the_supervisor(tmp_path: Path) -> None:
    """A worker may crash while the program, such as a server with many connections, has no descriptor left."""
    log_of(tmp_path, "prepare").write_text("Segmentation fault")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        lines = last_log_lines(tmp_path, "prepare")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert lines == "(the log cannot be read: Too many open files)"


def test_process_without_a_file_descriptor_is_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    open_descriptor, pids = os.pidfd_open, list[int]()

    def open_or_fail(pid: int) -> int:
        pids.append(pid)
        if len(pids) == 1:
            raise OSError(errno.EMFILE, "too many open files")
        return open_descriptor(pid)

    monkeypatch.setattr(os, "pidfd_open", open_or_fail)
    with Driver("hash-lm") as driver:
        assert driver.healthy
        with pytest.raises(ProcessLookupError):
            os.kill(pids[0], 0)


@pytest.fixture
def _sigchld_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("_sigchld_ignored")
def test_failed_start_is_detected_even_if_the_kernel_keeps_no_exit_codes(tmp_path: Path) -> None:
    """They read as 0, so a worker that exited by itself was restarted at once, for ever."""
    run_before(tmp_path).write_text("{")
    with pytest.raises(WorkerDied, match="Traceback") as caught:
        Driver("hash-lm", run_dir=tmp_path, start_timeout_s=10.0).start()
    assert caught.value.exit_code == 1


@pytest.mark.usefixtures("_sigchld_ignored", "own_servers")
@pytest.mark.parametrize("forks", [True, False])
def test_without_exit_codes_a_crash_is_told_from_a_kill_by_what_it_left_behind(forks: bool) -> None:
    """A kill from outside would blame the requests in progress, and the second one would end them."""
    with Driver("hash-lm", max_restarts=1000, fork_workers=forks) as driver:
        os.kill(old := pid_of(driver, "execute"), signal.SIGABRT)
        soon(lambda: is_replaced(driver, "execute", old))
        assert driver.health().workers["execute"].recent_deaths == 1
        os.kill(old := pid_of(driver, "execute"), signal.SIGKILL)
        soon(lambda: is_replaced(driver, "execute", old))
        driver.replace("execute")
        assert driver.health().workers["execute"].recent_deaths == 1
        assert driver.generate([5, 6], max_tokens=3, timeout=20).token_ids == expected_tokens([5, 6], 3, VOCAB_SIZE)
        assert driver.stop() == {"prepare": 0, "execute": 0, "summarize": 0}


WITH_A_LONG_TICK = """
import runpy, sys
import triptych.workers.process as process
process.TICK_S = 60.0
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


def test_idle_workers_are_woken_by_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def start_with_a_long_tick(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        python, _, *rest = command
        return popen([python, "-c", WITH_A_LONG_TICK, *rest], **options)

    driver = Driver("hash-lm", hang_s=100.0)
    with monkeypatch.context() as patch:
        patch.setattr("triptych.driver.processes.subprocess.Popen", start_with_a_long_tick)
        driver.start()
    assert driver.stop() == {"prepare": 0, "execute": 0, "summarize": 0}
