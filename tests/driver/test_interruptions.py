"""Signals in the middle of a call: the handler raises, or calls the driver or client that was interrupted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.driver.fake_service import FakeService, submit
from tests.driver.test_failed_start import our_threads
from tests.waiting import eventually
from triptych import Driver
from triptych.driver import driver as driver_module
from triptych.driver import session as session_module
from triptych.driver import supervisor as supervisor_module
from triptych.driver.control import ControlServer, Handlers
from triptych.driver.session import Session
from triptych.driver.stream import Stream
from triptych.driver.supervisor import Supervisor
from triptych.protocol import messages as m
from triptych.protocol.board import STOP, Board
from triptych.protocol.config import SupervisorConfig
from triptych.protocol.errors import PipelineClosed

# A server that is shared would be left behind by the first test that needs it.
pytestmark = pytest.mark.usefixtures("own_servers")


def interrupt(session: Session, handler: Callable[[], object]) -> None:
    """Deliver a signal while the next command is queued."""
    wake = session._connection.wake

    def handle_and_wake() -> None:
        session._connection.wake = wake  # type: ignore[method-assign]
        handler()
        wake()

    session._connection.wake = handle_and_wake  # type: ignore[method-assign]


def in_time(call: Callable[[], object]) -> None:
    """Run in a thread that may deadlock with itself."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it deadlocked with itself"


def test_client_can_be_used_after_an_interrupted_question(service: FakeService, session: Session) -> None:
    interrupt(session, lambda: submit(session, "b"))
    in_time(lambda: submit(session, "a"))
    assert {service.recv(m.Submit).request_id for _ in range(2)} == {"a", "b"}


def test_client_can_be_closed_after_an_interrupted_question(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "CLOSING_S", 0.05)
    session, streams = service.client(), list[Stream]()
    interrupt(session, session.close)
    in_time(lambda: streams.append(submit(session)))
    with pytest.raises(PipelineClosed):
        streams[0].result(10)
    eventually(lambda: not session._thread.is_alive())


def test_client_can_be_closed_after_an_interrupted_read(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "CLOSING_S", 0.05)
    session = service.client()
    stream = submit(session)

    def read() -> None:
        with stream._changed:
            session.close()

    in_time(read)
    with pytest.raises(PipelineClosed):
        stream.result(10)


@contextmanager
def nothing_left() -> Iterator[None]:
    threads, num_open = our_threads(), len(os.listdir("/proc/self/fd"))
    yield
    eventually(lambda: our_threads() <= threads)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= num_open)


@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize("name", ["journal", "supervisor", "control"])
def test_start_interrupted_while_a_thread_starts_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_begun: bool
) -> None:
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name != f"triptych-{name}":
            start(thread)
            return
        if has_begun:
            start(thread)
        raise KeyboardInterrupt

    driver = Driver("hash-lm", run_dir=tmp_path / "run", journal=str(tmp_path / "journal"), journal_flush="interval")
    monkeypatch.setattr(supervisor_module, "BEGIN_S", 0.05)
    with nothing_left(), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_fail)
        with pytest.raises(KeyboardInterrupt):
            driver.start()
    assert not (tmp_path / "run" / "control").exists()
    assert driver.stop() == {}


def test_stop_during_a_start_cancels_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler calls it: the thread that starts the driver also stops it."""
    driver = Driver("hash-lm", run_dir=tmp_path / "run")

    def stop_and_make(run_dir: Path, handlers: Handlers) -> ControlServer:
        driver.stop(mode="abort")
        return ControlServer(run_dir, handlers)

    monkeypatch.setattr(driver_module, "ControlServer", stop_and_make)
    with nothing_left(), pytest.raises(PipelineClosed, match="while it started"):
        driver.start()
    assert driver.stop() == {}


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    """With a board whose mode is STOP: no worker is wanted. The test that uses it stops it."""
    board = Board(tmp_path / "board")
    board.set_mode(STOP)
    supervisor = Supervisor(tmp_path, board, SupervisorConfig(), on_give_up=lambda error: None)
    supervisor.start()
    return supervisor


def test_stop_in_a_handler_that_interrupted_wait_ready_returns(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that must end needed the lock held by the thread that waited for it."""
    order = supervisor._order

    def order_and_let_it_happen(what: Callable[[], None]) -> None:
        order(what)
        eventually(lambda: supervisor._stopping)

    monkeypatch.setattr(supervisor, "_order", order_and_let_it_happen)

    def handle() -> None:
        with supervisor._changed:  # as ``wait_ready`` holds it
            supervisor.stop(1, mode=STOP)

    in_time(handle)


def test_start_notices_a_stop_in_a_handler_that_closes_the_board_while_it_reads_it(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, ready = supervisor._board, supervisor._board.ready

    def stop_and_look(role: str) -> bool:
        supervisor.stop(1, mode=STOP)
        board.close()
        return ready(role)

    monkeypatch.setattr(board, "ready", stop_and_look)
    with pytest.raises(PipelineClosed, match="while it started"):
        supervisor.wait_ready(float("inf"), patience_s=1)
