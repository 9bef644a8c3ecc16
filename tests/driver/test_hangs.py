"""Which silence of a worker counts as a hang, without processes that hang."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from triptych.driver.supervisor import CHECK_S, Supervisor
from triptych.driver.worker import Worker
from triptych.protocol.board import Board
from triptych.protocol.config import SupervisorConfig
from triptych.protocol.run_dir import board_path


class Silent(Worker):
    """A worker that shows no progress, and notes when it is killed."""

    def starved_s(self, *_: float) -> float:
        return 0.0

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("stood_s", "excused_s"), [(0.0, 0.0), (1.0, 1.0), (60.0, 2.0)], ids=["not at all", "shortly", "for long"]
)
def test_worker_has_time_to_go_on_after_the_whole_machine_stood_still(
    stood_s: float,
    excused_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a paused container. A step in progress takes some more time, and its requests are not to blame."""
    supervisor = Supervisor(tmp_path, Board(board_path(tmp_path)), SupervisorConfig(), on_give_up=lambda _: None)
    monkeypatch.setattr(supervisor, "_silence", lambda _: (61.0, 2.0))
    with subprocess.Popen(["true"]) as process:
        worker = supervisor._workers["execute"] = Silent("execute", process)
        now = time.monotonic()
        for looked_at in (now - 2 * CHECK_S - stood_s, now):  # two looks, the first of them late
            supervisor._looked_at = looked_at
            supervisor._look_for_hangs()
    assert worker.killed == (not excused_s)
    assert max(0.0, worker.excused_until - now) == pytest.approx(excused_s, abs=0.2)
    assert ("stood still for 60." in caplog.text) == (stood_s == 60.0)
    supervisor._end()


@pytest.mark.parametrize("phase", ["stopped", "failed"])
def test_worker_that_ends_after_hours_is_not_taken_for_one_that_starts_for_hours(phase: str, tmp_path: Path) -> None:
    """It takes a while to give its memory back, after it has said that it ends."""
    board = Board(board_path(tmp_path))
    supervisor = Supervisor(tmp_path, board, SupervisorConfig(), on_give_up=lambda _: None)
    with subprocess.Popen(["true"]) as process:
        worker = supervisor._workers["execute"] = Silent("execute", process, started_at=time.monotonic() - 36_000)
        board.worker("execute").set_phase(board.next_epoch("execute"), phase)
        supervisor._look_for_hangs()
        assert not worker.killed
    supervisor._end()
