"""/health and /ready report the state of the pipeline without sending a request to the model."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.cards import CARD
from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.page.test_live_page import watching
from tests.waiting import eventually
from triptych import Driver
from triptych.driver.first_epochs import first_epochs, note_first_epochs
from triptych.driver.standing import RequestList
from triptych.driver.supervisor import Supervisor
from triptych.launch.gateway.config import GatewayConfig
from triptych.launch.gateway.health import is_loaded, stages
from triptych.launch.gateway.serving import server
from triptych.launch.gateway.serving.address import listen
from triptych.launch.gateway.state import Gateway
from triptych.launch.watch.watched import Sample, Watched
from triptych.protocol.board import DRAIN, ROLES, RUN, Board
from triptych.protocol.config import PipelineConfig, SupervisorConfig
from triptych.protocol.journal.layout import Journal
from triptych.protocol.model_card import ModelCard
from triptych.protocol.run_dir import CONFIG_FILE, JOURNAL_FILE, board_path


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A stopped process, until the supervisor kills it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_working_pipeline_is_healthy(api: Site) -> None:
    reply = api.http.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (200, "ok")
    assert set(reply.json()["stages"]) == set(ROLES)
    assert api.http.get("/ready").json()["ready"] is True


def test_stage_is_stuck_after_what_it_expects_its_next_progress_to_take(tmp_path: Path) -> None:
    board, found = Board(tmp_path / "board"), list[float]()
    for patience_ns in (0, 40 * 10**9):
        board.worker("execute").set_patience(patience_ns)
        found.append(stages(board, SupervisorConfig(hang_s=30))["execute"]["stuck_after_s"])
    board.close()
    assert found == [30, 40]


def test_degraded_pipeline_that_answers_says_so(pipeline: Driver, api: Site) -> None:
    board, journal = Board(board_path(pipeline.run_dir)), Journal.open(pipeline.run_dir / JOURNAL_FILE)
    found = list[tuple[int, list[str], list[str]]]()
    for is_degraded, has_failed in ((True, True), (False, True), (False, False)):
        board.set_degraded(is_degraded)  # as the supervisor reports it
        journal.header["has_failed"] = has_failed  # as the flushing thread reports it
        reply = api.http.get("/health")
        counted = re.findall('triptych_degraded{.*reason="(.*)"} 1.0', api.http.get("/metrics").text)
        found.append((reply.status_code, reply.json()["degraded"], counted))
    board.close()
    journal.close()
    one, unwritten = "one_sequence_at_a_time", "journal_not_written"
    assert found == [(200, [one, unwritten], [one, unwritten]), (200, [unwritten], [unwritten]), (200, [], [])]


def test_pipeline_with_too_many_clients_says_so(pipeline: Driver, api: Site) -> None:
    worker = pipeline._running().supervisor._workers["prepare"]
    worker.crowded_at = time.monotonic()
    eventually(lambda: api.http.get("/health").json()["degraded"] == ["too_many_clients"])
    worker.crowded_at = -math.inf
    eventually(lambda: api.http.get("/health").json()["degraded"] == [])


def test_stuck_stage_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervisor, "_look_for_hangs", lambda _: None)  # it might be replaced between two looks
    with Driver("hash-lm", hang_s=1.0) as driver, site(driver.run_dir) as api:
        for role in ROLES:
            pid = driver.pids[role]
            assert pid is not None
            with stopped(pid):
                eventually(partial(is_reported, api, role))
            eventually(lambda: api.http.get("/health").status_code == 200)


def is_reported(api: Site, role: str) -> bool:
    reply = api.http.get("/health")
    return reply.status_code == 503 and role in reply.json()["unhealthy"]


@pytest.mark.usefixtures("own_servers")
def test_loading_model_is_a_503_and_can_be_watched() -> None:
    driver = Driver("demo", device="cpu", threads=1)
    driver.start(wait=False)
    try:
        with site(driver.run_dir) as api, watching(api) as frames:
            assert [api.http.get(path).status_code for path in ("/health", "/ping", "/ready")] == [503] * 3
            loading = next(frames)
            assert (loading["status"] != "ok", loading["model"]["model"]) == (True, None)
            reply = api.post("/v1/completions", prompt="hi")
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "loading")
            assert reply.headers["retry-after"]
            assert api.http.get("/v1/models").status_code == 200
            assert api.http.get("/metrics").status_code == 200
            eventually(lambda: api.http.get("/ready").status_code == 200, timeout=300)  # kernels may be compiled
            api.ask("/v1/completions", prompt="hi", max_tokens=1)
            assert next(frame for frame in frames if frame["status"] == "ok")["model"]["model"]
    finally:
        driver.stop(mode="abort")


def test_epochs_of_an_earlier_driver_do_not_count(tmp_path: Path) -> None:
    board = Board(board_path(tmp_path))
    CARD.publish(tmp_path)
    for role in ROLES:
        board.next_epoch(role)
    note_first_epochs(tmp_path, board)
    watched, found = Watched(tmp_path, {}, {}), []
    for _ in range(2):
        for role in ROLES:
            board.next_epoch(role)
        watched.see(Sample(0.0, board.stats(), RequestList([], 0, 0, [])))
        found.append((is_loaded(board, tmp_path, first_epochs(tmp_path)), watched.num_restarts))
    assert found == [(False, 0), (True, 3)]
    board.close()


def test_replaced_weights_are_reported(pipeline: Driver, api: Site) -> None:
    card = ModelCard.read(pipeline.run_dir)
    assert card is not None
    assert api.http.get("/v1/models").json()["data"][0]["root"] == "hash-lm"
    try:
        replace(card, model="another").publish(pipeline.run_dir)  # as the new execute does
        [model] = api.http.get("/v1/models").json()["data"]
        assert (model["id"], model["root"]) == ("hash-lm", "another")
        assert model["max_model_len"] == card.max_model_len  # which clients of vLLM read
        assert api.http.get("/server_info").json()["model"]["model"] == "another"
    finally:
        card.publish(pipeline.run_dir)


def test_draining_pipeline_is_not_ready_but_healthy(
    pipeline: Driver, api: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(board_path(pipeline.run_dir))
    board.set_mode(DRAIN)
    try:
        assert [api.http.get(path).status_code for path in ("/health", "/ping", "/ready")] == [200, 200, 503]
        assert api.refusal("/v1/completions", prompt="hi")[1]["code"] == "draining"
        monkeypatch.setattr(Gateway, "is_loaded", False)  # as at the end of a stop
        assert api.refusal("/v1/completions", prompt="hi")[1]["code"] == "draining"
    finally:
        board.set_mode(RUN)
        board.close()


def test_pipeline_that_gave_up_a_worker_says_so() -> None:
    with Driver("hash-lm", max_restarts=0) as driver, site(driver.run_dir) as api:
        pid = driver.pids["execute"]
        assert pid is not None
        os.kill(pid, signal.SIGSEGV)
        reply = eventually(lambda: r if (r := api.http.get("/health")).json()["mode"] == "failed" else None)
        assert (reply.status_code, reply.json()["status"]) == (503, "failed")
        assert api.refusal("/v1/completions", prompt="hi")[1]["code"] == "failed"


def test_pipeline_without_its_run_directory_answers_until_a_worker_dies() -> None:
    with Driver("hash-lm") as driver, site(driver.run_dir) as api:
        eventually(lambda: "facts" in vars(api.gateway))
        shutil.rmtree(driver.run_dir)
        reply = api.http.get("/health")
        assert (reply.status_code, reply.json()["degraded"]) == (200, ["run_directory_deleted"])
        assert api.ask("/v1/completions", prompt="hi", max_tokens=3)["usage"]["completion_tokens"] == 3
        pid = driver.pids["execute"]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: api.http.get("/health").json()["status"] == "gone")
        status, error = api.refusal("/v1/completions", prompt="hi")
        assert (status, error["code"]) == (503, "gone")
        assert error["message"] == f"the pipeline is gone: its run directory {api.gateway.run_dir} was deleted"


def test_gateway_that_nobody_supervises_ends_when_its_pipeline_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "GONE_S", 0.0)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / CONFIG_FILE).write_text(PipelineConfig().to_json())
    gateway = server.make_gateway(GatewayConfig(), run_dir)
    shutil.rmtree(run_dir)
    with listen(":0") as listener, pytest.raises(SystemExit, match="1"):
        server.serve(gateway, listener)
    assert f"the pipeline is gone: its run directory {run_dir} was deleted" in caplog.text


def test_request_waits_for_a_stage_that_restarts(pipeline: Driver, api: Site) -> None:
    pid = pipeline.pids["prepare"]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert api.ask("/v1/completions", prompt="hi", max_tokens=3)["usage"]["completion_tokens"] == 3


def test_server_reports_its_version_and_model(api: Site) -> None:
    info = api.http.get("/server_info").json()
    assert (info["model"]["model"], info["served_model_names"]) == ("hash-lm", ["hash-lm"])
    assert info["settings"]["gateway"]["stream_interval"] == 1
    assert api.http.get("/version").json()["version"] == info["version"]


def test_model_can_have_other_names(pipeline: Driver) -> None:
    with site(pipeline.run_dir, served_model_name=("mine", "also/mine")) as api:
        assert [model["id"] for model in api.http.get("/v1/models").json()["data"]] == ["mine", "also/mine"]
        assert api.http.get("/v1/models/also/mine").json()["id"] == "also/mine"
        assert api.ask("/v1/completions", prompt="hi", max_tokens=1)["model"] == "mine"
        assert api.refusal("/v1/completions", prompt="hi", model="hash-lm")[0] == 404


def test_what_requests_need_is_opened_before_they_take_all_files(pipeline: Driver) -> None:
    with site(pipeline.run_dir) as idle:
        eventually(lambda: {"client", "facts"} <= vars(idle.gateway).keys())
