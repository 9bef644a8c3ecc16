"""What happens to a worker whose socket was deleted, without processes that have sockets."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych.driver.socket_files import SocketFiles
from triptych.driver.worker import Worker
from triptych.protocol.board import Board
from triptych.protocol.config import ServiceConfig
from triptych.protocol.errors import PipelineClosed
from triptych.protocol.run_dir import board_path


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board(board_path(tmp_path))
    board.worker("prepare").set_phase(board.next_epoch("prepare"), "ready")
    yield board
    board.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield Worker("prepare", process)
        process.kill()


@pytest.mark.parametrize(
    ("files", "service", "is_killed"),
    [
        (("prepare.inbox", "submit"), ServiceConfig(), False),
        (("prepare.inbox",), ServiceConfig(), True),
        (("submit",), ServiceConfig(), True),
        (("prepare.inbox",), ServiceConfig(submit="ipc://elsewhere/submit"), False),
    ],
    ids=["all there", "no submit", "no inbox", "submit is elsewhere"],
)
def test_ready_worker_without_its_files_is_killed_at_the_first_look(
    files: tuple[str, ...], service: ServiceConfig, is_killed: bool, tmp_path: Path, board: Board, worker: Worker
) -> None:
    for name in files:
        (tmp_path / name).touch()
    SocketFiles(tmp_path, service, board, on_deleted=lambda _: None).look(worker)
    assert worker.killed is is_killed


def test_deleted_run_directory_is_reported_once_and_kills_no_one(tmp_path: Path, board: Board, worker: Worker) -> None:
    """The next worker would find nothing, and clients that are connected can still be answered."""
    errors = list[PipelineClosed]()
    sockets = SocketFiles(tmp_path / "gone", ServiceConfig(), board, on_deleted=errors.append)
    assert sockets.problem == ""
    sockets.look(worker)
    sockets.look(worker)
    assert [error.message for error in errors] == [sockets.problem]
    assert f"{tmp_path / 'gone'} was deleted" in sockets.problem
    assert not worker.killed
