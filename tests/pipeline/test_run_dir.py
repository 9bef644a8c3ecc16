"""A run directory that outlives its driver."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from tests.pipeline.checks import expected
from tests.pipeline.conftest import hash_driver
from tests.waiting import eventually
from triptych import Client, Driver
from triptych.protocol.errors import PipelineClosed


def test_new_driver_with_other_settings_reports_its_own(tmp_path: Path) -> None:
    with hash_driver(run_dir=tmp_path / "run", max_model_len=100) as driver:
        assert driver.info()["model"]["max_model_len"] == 100
    with hash_driver(run_dir=tmp_path / "run", max_model_len=400, max_num_seqs=7) as driver:
        card = driver.info()["model"]
        assert (card["max_model_len"], card["max_num_seqs"]) == (400, 7)
        assert driver.generate([1, 2], max_tokens=4).token_ids == expected([1, 2], 4)


def test_unread_answer_survives_a_restart_of_the_whole_pipeline(tmp_path: Path) -> None:
    slow = hash_driver(run_dir=tmp_path / "run", lease_s=60.0, hash_step_ms=20)  # the client leaves before the end
    with slow as driver, Client(driver.run_dir) as client:
        client.submit([7, 7], max_tokens=5, request_id="kept").accepted(10)
    with hash_driver(run_dir=tmp_path / "run", lease_s=60.0) as driver:
        completion = driver.client.resume("kept").result(20)
        assert completion.token_ids == expected([7, 7], 5)


def test_sockets_that_were_deleted_are_bound_again(driver: Driver) -> None:
    """Without them no new client, and no restarted worker, could connect, and requests would wait for ever."""
    files = [driver.run_dir / name for name in ("submit", "follow", "execute.inbox")]
    for file in files:
        file.unlink()
    eventually(lambda: all(file.exists() for file in files), timeout=60)  # three processes are replaced
    with Client(driver.run_dir) as client:
        assert client.generate([3, 4], max_tokens=4).token_ids == expected([3, 4], 4)


def test_deleted_run_directory_leaves_no_request_waiting(tmp_path: Path) -> None:
    """The driver's own client may not have connected yet, and never will."""
    with hash_driver(run_dir=tmp_path / "run") as driver:
        shutil.rmtree(driver.run_dir)
        with contextlib.suppress(PipelineClosed):  # or else it was connected
            assert driver.generate([3, 4], max_tokens=4, timeout=20).token_ids == expected([3, 4], 4)
        eventually(lambda: driver.health().status == "degraded")
        assert f"{driver.run_dir} was deleted" in driver.health().reason
