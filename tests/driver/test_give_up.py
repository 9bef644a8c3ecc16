"""When the driver gives up, everyone who waits for an answer gets an error."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.checks import expected
from tests.waiting import eventually
from triptych import AsyncDriver, Client, Driver
from triptych.driver.blame import Blame
from triptych.driver.journal_keeper import JournalKeeper
from triptych.driver.stand_in import StandIn
from triptych.driver.supervisor import CHECK_S, Supervisor
from triptych.protocol.board import Board
from triptych.protocol.config import ServiceConfig
from triptych.protocol.errors import JournalError, PipelineFailed, TriptychError, WorkerDied
from triptych.protocol.run_dir import board_path

SLOW: dict[str, Any] = {"model": "hash-lm", "hash_step_ms": 20.0, "max_restarts": 0}


def test_streams_end_when_the_driver_gives_up() -> None:
    with Driver(**SLOW) as driver:
        stream = driver.submit([1, 2], max_tokens=2000)
        deltas = iter(stream)
        next(deltas)
        os.kill(eventually(lambda: driver.pids["execute"]), signal.SIGABRT)
        with pytest.raises(WorkerDied, match="execute"):
            list(deltas)
        with pytest.raises(WorkerDied):
            driver.submit([1, 2])
        codes = driver.stop(mode="abort")
        assert codes["execute"] == -signal.SIGABRT


def test_supervisor_whose_every_turn_fails_leaves_the_processor_and_the_log_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[float] = []
    turn = Supervisor._turn

    with Driver("hash-lm") as driver:
        own = driver._parts().supervisor

        def fail(supervisor: Supervisor) -> None:
            if supervisor is not own:  # of a driver that other tests share
                return turn(supervisor)
            turns.append(time.monotonic())
            raise OSError("no files are left")

        with monkeypatch.context() as patch:
            patch.setattr(Supervisor, "_turn", fail)
            eventually(lambda: len(turns) > 1)
            assert turns[1] - turns[0] >= CHECK_S
        with pytest.raises(TriptychError, match="the supervisor failed"):
            driver.submit([1])


def test_truncated_journal_ends_the_pipeline_at_once_and_not_the_program_that_holds_the_driver(tmp_path: Path) -> None:
    """Every process that reads on would die, whatever it does: to restart it again and again would blame requests."""
    with Driver("hash-lm", hash_step_ms=20.0, journal=str(tmp_path / "journal")) as driver:
        with Client(driver.run_dir) as client:
            streams = [each.submit([1, 2], max_tokens=2000) for each in (driver, client)]
            next(iter(streams[0]))
            os.truncate(tmp_path / "journal", 0)
            with pytest.raises(JournalError, match="truncated to 0 bytes while it was in use"):
                streams[0].result(20)
            with pytest.raises(PipelineFailed):
                streams[1].result(20)
        assert driver.health().reason.endswith("while it was in use")
        assert sum(driver.stop().values()) < 0  # type: ignore[arg-type]


def test_no_request_is_blamed_in_a_journal_that_cannot_be_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """To write that would end the program that holds the driver."""

    def fail(*_: object) -> None:
        raise JournalError("it was truncated")

    blamed = list[object]()
    monkeypatch.setattr(JournalKeeper, "check_after", fail)
    monkeypatch.setattr(Blame, "note_death", lambda *death, **_: blamed.append(death))
    with Driver("hash-lm") as driver:
        os.kill(eventually(lambda: driver.pids["execute"]), signal.SIGKILL)
        eventually(lambda: driver.health().status == "failed")
    assert blamed == []


def test_drain_does_not_hide_that_the_driver_gave_up() -> None:
    with Driver(**SLOW) as driver, Client(driver.run_dir) as client:
        run_dir = driver.run_dir
        streams = [client.submit([1, 2], max_tokens=2000) for _ in range(3)]
        next(iter(streams[0]))
        os.kill(eventually(lambda: driver.pids["execute"]), signal.SIGABRT)
        eventually(lambda: driver.health().status == "failed")
        with pytest.raises(WorkerDied):
            driver.drain(0.1)
        for stream in streams:
            with pytest.raises(PipelineFailed):
                stream.result(20)
        refuses_a_late_client(run_dir)


def test_drain_during_which_the_driver_gives_up_returns_false() -> None:
    with Driver(**SLOW) as driver, ThreadPoolExecutor(1) as pool:
        stream = driver.submit([1, 2], max_tokens=2000)
        next(iter(stream))
        drain = pool.submit(driver.drain)
        eventually(lambda: driver.health().status == "draining")
        os.kill(eventually(lambda: driver.pids["summarize"]), signal.SIGABRT)
        assert drain.result(20) is False


def test_async_streams_end_when_the_driver_gives_up() -> None:
    async def run() -> None:
        async with AsyncDriver(**SLOW) as driver:
            stream = driver.submit([1, 2], max_tokens=2000)
            await stream.accepted()
            os.kill(eventually(lambda: driver.driver.pids["execute"]), signal.SIGABRT)
            with pytest.raises(WorkerDied):
                await stream.result()

    asyncio.run(run())


def test_requests_waiting_for_prepare_fail_when_it_is_given_up() -> None:
    """Including a request so large that its client first asks for the size limit."""
    with Driver(**SLOW) as driver, Client(driver.run_dir) as client:
        run_dir, service = driver.run_dir, client.info()["limits"]
        kill_and_give_up(driver, "prepare")
        for prompt in ([1, 2], [1, 2] * 1000):
            with Client(run_dir) as late, pytest.raises(PipelineFailed, match="gave up"):
                late.submit(prompt, max_tokens=2).result(20)
        assert client.info()["limits"] == service


def test_large_request_fails_even_if_no_model_was_ever_loaded(tmp_path: Path) -> None:
    board = Board(board_path(tmp_path))
    stand_in = StandIn("prepare", tmp_path, ServiceConfig(), board)
    try:
        with Client(tmp_path) as client, pytest.raises(PipelineFailed, match="gave up"):
            client.submit([1, 2] * 1000).result(10)
    finally:
        stand_in.close()
        board.close()


def test_followers_get_an_end_when_summarize_is_given_up() -> None:
    """Even a client in another process, which only the service can inform, of accepted requests and of their status."""
    with Driver(**SLOW) as driver, Client(driver.run_dir) as client:
        run_dir = driver.run_dir
        streams = [client.submit([1, index], max_tokens=2000) for index in range(3)]
        next(iter(streams[0]))
        for stream in streams:
            stream.accepted(20)
        kill_and_give_up(driver, "summarize")
        for index, stream in enumerate(streams):
            with pytest.raises(PipelineFailed, match="gave up") as caught:
                stream.result(20)
            output = caught.value.partial.token_ids
            assert output == expected([1, index], len(output))
        with Client(run_dir) as late:
            assert late.stats()["summarize"]["phase"] == "down"
            assert late.status(streams[0].request_id).state == "unknown"
            assert late.requests().lines == []
            with pytest.raises(PipelineFailed, match="gave up"):
                late.resume(streams[0].request_id).result(20)
        refuses_a_late_client(run_dir)


def refuses_a_late_client(run_dir: Path) -> None:
    with Client(run_dir) as late, pytest.raises(PipelineFailed, match="gave up"):
        late.submit([1, 2], max_tokens=2).result(20)


def kill_and_give_up(driver: Driver, role: str) -> None:
    os.kill(eventually(lambda: driver.pids[role]), signal.SIGABRT)
    eventually(lambda: driver.health().status == "failed")
