"""The exit code of ``serve`` where a process could not be interrupted precisely, and what it refuses."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.pipeline.conftest import hash_driver
from tests.protocol.factories import TIMES, make_record
from triptych.driver.session import Session
from triptych.launch.gateway.config import GatewayConfig
from triptych.launch.gateway.serving.address import listen, url_of
from triptych.launch.terminal import startup
from triptych.launch.verbs import serve as serve_module
from triptych.launch.verbs.serve import Task, serve
from triptych.protocol.config import PipelineConfig
from triptych.protocol.errors import ConfigError, RequestTimeout
from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.requests import RequestWriter


@contextmanager
def interrupted() -> Iterator[list[int]]:
    yield [signal.SIGINT]


@pytest.mark.parametrize("num_kept", [0, 1])
def test_interrupted_start_exits_with_0_only_if_no_request_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_kept: int
) -> None:
    tmp_path.chmod(0o700)
    journal = Journal.create(tmp_path / "journal", num_records=4, arena_bytes=1 << 16)
    for _ in range(num_kept):
        RequestWriter(journal).accept(make_record(), TIMES)
    monkeypatch.setattr(startup, "interrupts_noted", interrupted)
    monkeypatch.setattr(signal, "signal", lambda *_: signal.SIG_DFL)
    task = Task(
        config=PipelineConfig.from_options(model="hash-lm"),
        gateway=GatewayConfig(),
        run_dir=tmp_path,
        drain_timeout=0.0,
        log_level="info",
    )
    assert serve(task, console=Console(quiet=True)) == num_kept
    assert ("requests kept for the next driver: 1" in caplog.text) == bool(num_kept)


@pytest.mark.parametrize("address", [None, "127.0.0.1:0"])
@pytest.mark.parametrize(
    ("setting", "name", "why"),
    [
        ("api_key_file", "keys", "cannot be read"),
        ("ssl_certfile", "certificate.pem", "cannot be read"),
        ("lora_root", "adapters", "does not exist"),
        ("lora_root", "file", "is not a directory"),
        ("lora_root", "x" * 300, "cannot be read: File name too long"),
    ],
)
def test_unusable_path_is_reported_before_anything_starts(
    tmp_path: Path, address: str | None, setting: str, name: str, why: str
) -> None:
    (tmp_path / "file").touch()
    task = Task(
        config=PipelineConfig.from_options(model="hash-lm"),
        gateway=GatewayConfig(http=address, **{setting: str(tmp_path / name)}),  # type: ignore[arg-type]
        run_dir=tmp_path / "run",
        drain_timeout=0.0,
        log_level="info",
    )
    with pytest.raises(ConfigError, match=f"{setting} .*{name} {why}"):
        serve(task, console=Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_taken_port_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with listen(":0") as other:
        address = url_of(other).removeprefix("http://")
        task = Task(
            config=PipelineConfig.from_options(model="hash-lm"),
            gateway=GatewayConfig(http=address),
            run_dir=tmp_path / "run",
            drain_timeout=0.0,
            log_level="info",
        )
        with pytest.raises(ConfigError, match=f"cannot listen at {address}: Address already in use"):
            serve(task, console=Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_server_goes_on_while_a_worker_has_not_published_statistics_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that stood still right after the start."""
    sleeps = iter((None, KeyboardInterrupt))

    def sleep(_: float) -> None:
        if (error := next(sleeps)) is not None:
            raise error

    stats: dict[str, Any] = {"prepare": {}, "execute": {}, "summarize": {}}
    driver: Any = SimpleNamespace(
        client=SimpleNamespace(stats=lambda timeout: stats), health=lambda: SimpleNamespace(status="starting")
    )
    monkeypatch.setattr(serve_module, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        serve_module._report_for_ever(driver)


def test_watchdog_hears_nothing_once_the_driver_has_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    turns = iter(["ok", "degraded", "failed", "failed"])
    state = SimpleNamespace(status="", reason="why")

    def sleep(_: float) -> None:
        if (status := next(turns, None)) is None:
            raise KeyboardInterrupt
        state.status = status

    stats: dict[str, Any] = {"prepare": {}, "execute": {}, "summarize": {}}
    driver: Any = SimpleNamespace(client=SimpleNamespace(stats=lambda timeout: stats), health=lambda: state)
    monkeypatch.setattr(serve_module, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    monkeypatch.setattr(serve_module, "notify", told.append)
    with pytest.raises(KeyboardInterrupt):
        serve_module._report_for_ever(driver)
    assert told == ["WATCHDOG=1", "WATCHDOG=1", "STATUS=why"]


def test_start_is_over_although_prepare_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    silence: Future[Any] = Future()
    silence.set_exception(RequestTimeout("no answer"))
    monkeypatch.setattr(Session, "ask", lambda *_: silence)
    caplog.set_level(logging.INFO, serve_module.logger.name)
    driver = hash_driver()
    try:
        serve_module._start(driver.start(wait=False), Console(quiet=True), None)
    finally:
        driver.stop(mode="abort")
    assert "model hash-lm" in caplog.text
    assert "ready: " in caplog.text


def test_empty_folder_of_adapters_is_not_the_current_one() -> None:
    with pytest.raises(ConfigError, match="lora_root is empty"):
        GatewayConfig(lora_root="").check_lora_root()
