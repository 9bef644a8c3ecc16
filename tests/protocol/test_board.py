"""The board shows which workers are alive and what they do, and reading it never blocks."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually
from triptych.protocol.board import DRAIN, PAGE, PHASES, ROLES, RUN, STOP, Board, WorkerPage
from triptych.protocol.codec import pack


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board(tmp_path / "board")
    yield board
    board.close()


def write_stats_bytes(path: Path, role: str, content: bytes, *, half: int) -> None:
    """Store statistics without the word that publishes them."""
    with open(path / "board", "r+b") as file:
        file.seek(PAGE * (1 + 2 * ROLES.index(role)) + (PAGE if half else 48))
        file.write(content)


def test_new_board_shows_no_worker(board: Board) -> None:
    assert board.stats() == {role: {"phase": "down", "epoch": 0} for role in ROLES}
    assert board.mode == RUN


@pytest.mark.parametrize("mode", [RUN, DRAIN, STOP])
def test_mode_is_visible_to_all_processes(board: Board, tmp_path: Path, mode: int) -> None:
    board.set_mode(mode)
    assert Board(tmp_path / "board").mode == mode


def test_epochs_are_counted_per_role(board: Board, tmp_path: Path) -> None:
    assert [board.next_epoch("execute") for _ in range(3)] == [1, 2, 3]
    assert [Board(tmp_path / "board").epoch(role) for role in ROLES] == [0, 3, 0]


def test_next_driver_continues_the_epochs(board: Board, tmp_path: Path) -> None:
    board.next_epoch("prepare")
    assert Board(tmp_path / "board").next_epoch("prepare") == 2


@pytest.mark.parametrize("phase", PHASES)
def test_phase_is_visible_to_all_processes(board: Board, tmp_path: Path, phase: str) -> None:
    epoch = board.next_epoch("summarize")
    board.worker("summarize").set_phase(epoch, phase)
    assert Board(tmp_path / "board").worker("summarize").phase(epoch) == phase


def test_phase_of_an_earlier_epoch_reads_as_down(board: Board) -> None:
    board.worker("execute").set_phase(board.next_epoch("execute"), "ready")
    assert board.ready("execute")
    board.next_epoch("execute")
    assert (board.ready("execute"), board.stats()["execute"]["phase"]) == (False, "down")


def test_late_write_of_an_earlier_epoch_does_not_affect_the_current_one(board: Board) -> None:
    page = board.worker("execute")
    page.set_phase(1, "ready")
    assert page.phase(2) == "down"


def test_progress_is_shown_with_its_time(board: Board) -> None:
    page = board.worker("execute")
    before = time.monotonic_ns()
    page.progress(3, 10)
    assert page.done_of_total == (3, 10)
    assert before <= page.progress_ns <= time.monotonic_ns()


def test_heartbeat_keeps_the_progress(board: Board) -> None:
    page = board.worker("execute")
    page.progress(3, 10)
    page.progress()
    assert page.done_of_total == (3, 10)


def test_new_phase_starts_without_progress(board: Board) -> None:
    page = board.worker("execute")
    page.progress(3, 10)
    page.set_phase(1, "warming")
    assert page.done_of_total == (0, 0)


def test_patience_is_visible_to_all_processes(board: Board, tmp_path: Path) -> None:
    board.worker("execute").set_patience(5_000_000)
    assert Board(tmp_path / "board").worker("execute").patience_ns == 5_000_000


@pytest.mark.parametrize("stats", [{}, {"a": 1}, {"deep": {"list": [1, 2.5, "x", None]}}, {"long": "x" * 60_000}])
def test_statistics_are_read_back(board: Board, tmp_path: Path, stats: dict[str, Any]) -> None:
    board.worker("prepare").publish({"something": "longer than that"})
    board.worker("prepare").publish(stats)
    assert Board(tmp_path / "board").worker("prepare").stats() == stats


def test_each_worker_has_its_own_statistics(board: Board) -> None:
    for role in ROLES:
        board.worker(role).publish({"i am": role})
    assert {role: stats["i am"] for role, stats in board.stats().items()} == {role: role for role in ROLES}


def test_oversized_statistics_fail_an_assertion(board: Board) -> None:
    with pytest.raises(AssertionError, match=r"statistics of 70\d\d\d bytes, the limit is 65488"):
        board.worker("prepare").publish({"x": "y" * 70_000, "z": 1})


@pytest.mark.parametrize("num_bytes", [1, 5, 12])
def test_previous_statistics_are_read_while_new_ones_are_half_written(
    board: Board, tmp_path: Path, num_bytes: int
) -> None:
    page, halves = board.worker("execute"), itertools.cycle((0, 1))
    for number in range(1, 4):
        page.publish({"num": number, "b": 2})
        write_stats_bytes(tmp_path, "execute", pack({"tum": 3, "c": 4})[:num_bytes], half=next(halves))
        assert page.stats() == {"num": number, "b": 2}


def test_torn_statistics_are_not_read(board: Board, tmp_path: Path) -> None:
    board.worker("execute").publish({"num": 1})
    write_stats_bytes(tmp_path, "execute", pack({"tum": 1})[:3], half=1)
    assert board.worker("execute").stats() == {}


def test_concurrent_reader_sees_complete_statistics(board: Board, tmp_path: Path) -> None:
    numbers = itertools.count()
    enough = threading.Event()

    def write() -> None:
        while not enough.is_set():
            n = next(numbers)
            board.worker("execute").publish({"n": n, "pad": "x" * (n % 500), "again": n})

    writer = threading.Thread(target=write)
    writer.start()
    read = read_until(Board(tmp_path / "board").worker("execute"), count=300)
    enough.set()
    writer.join()
    assert all(stats["n"] == stats["again"] for stats in read)
    assert [stats["n"] for stats in read] == sorted(stats["n"] for stats in read), "time went backwards"


def read_until(page: WorkerPage, *, count: int) -> list[dict[str, Any]]:
    """Read as fast as possible until that many different statistics have been seen."""
    read: list[dict[str, Any]] = []

    def enough() -> bool:
        stats = page.stats()
        if stats and stats not in read[-1:]:
            read.append(stats)
        return len(read) >= count

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # between almost any two stores
    try:
        eventually(enough, interval=0)
    finally:
        sys.setswitchinterval(interval)
    return read


def test_board_can_be_closed_while_another_thread_reads(tmp_path: Path) -> None:
    board = Board(tmp_path / "board")
    row = board._driver  # held like this by a thread that is about to read the mode
    board.close()
    assert int(row["mode"]) == RUN
