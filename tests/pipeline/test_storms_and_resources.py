"""Many failures at once: requests that cannot be served get a clear error, and the others continue."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.pipeline.checks import expected
from tests.pipeline.conftest import hash_driver
from tests.pipeline.raw import RawClient
from tests.pipeline.serving import DriverProcess
from tests.waiting import eventually
from triptych import Client, Driver
from triptych.driver.control import ask
from triptych.protocol.board import Board
from triptych.protocol.errors import ConfigError, Overloaded, PipelineFailed, WorkerDied
from triptych.protocol.run_dir import board_path


def abort_execute(driver: Driver) -> None:
    """A crash that looks like execute's own fault, while no request is suspected of an earlier one."""
    eventually(lambda: driver.healthy and not driver.stats()["execute"].get("suspects"))
    pid = driver.pids["execute"]
    assert pid is not None
    os.kill(pid, signal.SIGABRT)
    eventually(lambda: driver.health().workers["execute"].pid != pid)


def test_many_crashes_degrade_the_pipeline_and_then_fail_waiting_requests() -> None:
    with hash_driver(hash_step_ms=1.0, lease_s=30.0, degrade_after=1, max_restarts=3) as driver:
        prompts = [[i, 7] for i in range(1, 5)]
        streams = [driver.submit(prompt, max_tokens=300) for prompt in prompts]
        abort_execute(driver)
        abort_execute(driver)
        eventually(lambda: driver.health().status == "degraded")
        assert [s.result(60).token_ids for s in streams] == [expected(p, 300) for p in prompts]
        with Client(driver.run_dir) as client:
            open_ones = [client.submit(prompt, max_tokens=4000) for prompt in prompts]
            for stream in open_ones:
                stream.accepted(20)
            abort_execute(driver)
            abort_execute(driver)
            for stream in open_ones:
                with pytest.raises(PipelineFailed, match="gave up"):
                    stream.result(20)
            with pytest.raises(PipelineFailed):
                client.submit([1, 2]).result(20)
            assert client.stats()["summarize"]["phase"] == "ready"
        assert driver.health().status == "failed"
        assert "execute ended with exit code -6" in driver.health().reason
        with pytest.raises(WorkerDied):
            driver.submit([1, 2])


def test_full_journal_refuses_and_recovers() -> None:
    with hash_driver(max_records=4, hash_step_ms=2.0, lease_s=30.0) as driver:
        streams = [driver.submit([i, 3], max_tokens=300) for i in range(1, 5)]
        for stream in streams:
            stream.accepted(20)
        with pytest.raises(Overloaded, match="needs 1 records of the journal, 0 of 4 are free"):
            driver.submit([9, 9], max_tokens=2).result(20)
        assert [len(stream.result(30).token_ids) for stream in streams] == [300] * 4
        eventually(lambda: driver.stats()["prepare"]["records_used"] == 0)
        assert driver.generate([9, 9], max_tokens=2).token_ids == expected([9, 9], 2)


def test_full_disk_is_named_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"the journal .* needs .* bytes"),
        hash_driver(run_dir=tmp_path / "run", arena_bytes=1 << 40),
    ):
        pass
    assert not list((tmp_path / "run").glob("journal*"))


def test_journal_in_a_missing_folder_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="No such file or directory"),
        hash_driver(journal=str(tmp_path / "nowhere" / "journal")),
    ):
        pass


def test_unwritable_trace_path_is_named(tmp_path: Path) -> None:
    place = str(tmp_path / "nowhere" / "trace")
    with pytest.raises(ConfigError, match=re.escape(f"the trace {place!r} cannot be written: ")):
        hash_driver(trace=place).start()


def test_trace_that_cannot_be_written_affects_only_the_trace(tmp_path: Path) -> None:
    with hash_driver(trace="/dev/full") as driver:
        assert driver.generate([1, 2], max_tokens=50).token_ids == expected([1, 2], 50)
        assert driver.stats()["restarts"]["execute"] == 0


def test_trace_that_can_be_written_no_more_does_not_keep_execute_from_its_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "on a disk that fails"
    folder.mkdir()
    with hash_driver(trace=str(folder / "trace")) as driver:
        shutil.rmtree(folder)
        driver.replace("execute")
        assert driver.generate([1, 2], max_tokens=5).token_ids == expected([1, 2], 5)
        assert "the trace cannot be written: No such file or directory" in (driver.run_dir / "execute.log").read_text()


def test_lack_of_file_descriptors_affects_only_new_connections(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(0o700)
    options = {"model": "hash-lm", "hash_step_ms": 5.0, "lease_s": 60.0, "max_restarts": 1000}
    with DriverProcess(run_dir, max_files=60, **options) as driver, Client(run_dir) as client:
        driver.wait_ready()
        stream = client.submit([5, 6], max_tokens=400)
        next(iter(stream))
        crowd = [RawClient(run_dir) for _ in range(60)]
        eventually(lambda: "may open no file for another client" in str(ask(run_dir, "health")["reason"]))
        board = Board(board_path(run_dir))
        assert board.crowded  # for the gateway
        board.close()
        assert stream.result(60).token_ids == expected([5, 6], 400)
        for one in crowd:
            one.__exit__()
        with Client(run_dir) as late:
            assert late.generate([7, 8], max_tokens=5, timeout=30).token_ids == expected([7, 8], 5)
