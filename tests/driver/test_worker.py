"""How the deaths of a worker are counted."""

from __future__ import annotations

import logging
import os
import signal
import subprocess

import pytest

from tests.waiting import eventually
from triptych.driver import worker as worker_module
from triptych.driver.deaths import CROWDED
from triptych.driver.processes import Process
from triptych.driver.worker import CROWD_LASTS_S, MAX_BACK_OFF_S, Worker
from triptych.protocol import starvation
from triptych.protocol.errors import WorkerDied
from triptych.protocol.proc_stat import is_stopped


def make_worker(*explained: int) -> Worker:
    """A worker that died that often, a second apart, with that many deaths explained each time."""
    worker = Worker("prepare")
    for second, count in enumerate(explained):
        worker.note_death(float(second), WorkerDied("prepare", 1, "a line\nKeyError: 5"), num_explained=count)
    return worker


@pytest.mark.parametrize(
    ("explained", "num_left"),
    [((0, 0, 0), 3), ((0, 2), 0), ((0, 0, 2), 1), ((0, 2, 0, 2, 0), 1), ((2,), 0)],
    ids=["nobody named", "named", "one besides", "again and again", "more than there are"],
)
def test_deaths_blamed_on_a_request_do_not_count(explained: tuple[int, ...], num_left: int) -> None:
    worker = make_worker(*explained)
    assert (len(worker.deaths), len(worker.all_deaths)) == (num_left, len(explained))


def test_worker_may_end_while_another_thread_asks_for_its_health() -> None:
    worker = Ending("prepare")
    with subprocess.Popen(["true"]) as process:
        worker.left = [process]
        assert worker.pid == process.pid
        worker.left = [process]
        worker.stopped_s(1.0)
        assert worker.pid is None


class Ending(Worker):
    """Its process is there when it is looked at first, and then no more."""

    left: list[subprocess.Popen[bytes]]

    @property
    def process(self) -> Process | None:
        return self.left.pop() if self.left else None

    @process.setter
    def process(self, _: Process | None) -> None: ...


def test_death_for_lack_of_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "memory_ran_out", lambda: "memory ran out (limit 9 MiB)")
    worker = Worker("execute")
    error = worker.why_died(-9, "loading", out_of_memory=True)
    worker.note_death(0.0, error, num_explained=0)
    assert "ended with exit code -9, memory ran out (limit 9 MiB); " in error.message
    assert worker.last_death == "exit code -9, memory ran out (limit 9 MiB): loading"


def test_health_names_the_last_death_in_one_line() -> None:
    health = make_worker(0).health(phase="loading", ok=False, since_progress_s=0.5, epoch=2)
    assert health.last_death == "exit code 1: KeyError: 5"


def test_health_names_what_a_crashed_process_said_and_not_the_end_of_its_stacks() -> None:
    worker, stacks = (
        Worker("prepare"),
        "Fatal Python error: Aborted\n\nThread 0x1:\n\nExtension modules: numpy (total: 1)",
    )
    for log, said in (
        (f"memory allocation of 8 bytes failed\n{stacks}", "memory allocation of 8 bytes failed"),
        (stacks, "Fatal Python error: Aborted"),
        ("", ""),
    ):
        worker.note_death(0.0, WorkerDied("prepare", -6, log), num_explained=0)
        assert worker.last_death == "exit code -6" + (f": {said}" if said else "")


def test_worker_with_too_many_clients_is_crowded_until_it_has_been_well_for_a_while() -> None:
    worker = Worker("prepare")
    assert not worker.is_crowded(5.0)
    worker.note_shortage(CROWDED, 5.0, window_s=60.0)
    assert worker.is_crowded(5.0 + CROWD_LASTS_S / 2)
    assert not worker.is_crowded(5.0 + CROWD_LASTS_S)
    health = worker.health(phase="ready", ok=True, since_progress_s=0.0, epoch=2)
    assert (health.last_death, health.recent_deaths) == (CROWDED, 0)


def test_end_of_a_restart_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worker = Worker("prepare", started_at=100.0, num_restarts=1)
    for phase, now in (("loading", 101.0), ("ready", 124.9), ("ready", 125.0)):
        worker.note_phase(phase, now)
    assert caplog.messages == ["prepare is ready again 24.9 s after its start"]
    Worker("prepare").note_phase("ready", 1.0)
    assert len(caplog.messages) == 1  # the first start has been reported by whoever waited for it


def test_old_deaths_are_forgotten() -> None:
    worker = make_worker(0, 0, 2, 0)
    worker.forget_deaths(before=2.0)
    assert (list(worker.deaths), list(worker.all_deaths)) == ([3.0], [2.0, 3.0])


def test_restart_delay_grows_with_unexplained_deaths() -> None:
    assert make_worker().back_off_s == make_worker(0, 2).back_off_s == 0.0
    assert [make_worker(*[0] * n).back_off_s for n in (1, 2, 3)] == [0.01, 0.02, 0.04]
    assert make_worker(*[0] * 2000).back_off_s == MAX_BACK_OFF_S


def test_silence_without_processor_time_is_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting counts in the second half of the patience, for the longest-waiting thread, until there is progress."""
    delays_s = [{1: 5.0}, {1: 6.5, 2: 0.5}, {1: 7.0, 2: 9.0}, {1: 9.0}]
    seen = iter([{thread: int(s * 1e9) for thread, s in each.items()} for each in delays_s])
    monkeypatch.setattr(starvation, "run_delays", lambda pid: next(seen))
    process = subprocess.Popen(["true"])
    process.wait()
    worker = Worker("prepare", process)
    assert [worker.starved_s(silent_s, 3.0) for silent_s in (1.0, 2.0, 4.0, 5.0)] == [0.0, 0.0, 1.5, 9.0]
    assert [worker.starved_s(silent_s, 3.0) for silent_s in (0.1, 2.0)] == [0.0, 0.0]


def test_worker_that_was_stopped_by_a_signal_is_killed_without_being_at_fault() -> None:
    """Its requests would be suspected, and run alone."""
    with subprocess.Popen(["sleep", "600"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: is_stopped(process.pid))
        worker = Worker("execute", process)
        worker.kill_hung()
        assert (process.wait(), worker.killed, worker.hung) == (-signal.SIGKILL, True, False)
