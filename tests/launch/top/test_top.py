"""``triptych top`` on a running pipeline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.driver.test_supervisor import pid_of
from tests.launch.conftest import Triptych
from tests.launch.own_terminal import terminal
from tests.waiting import eventually
from triptych import Client, Driver
from triptych.launch.find import running_pipelines, the_running_pipeline
from triptych.protocol.errors import ConfigError
from triptych.protocol.run_dir import CONFIG_FILE


def test_one_frame_is_printed(triptych: Triptych, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with Client(run_dir) as client:
        stream = client.submit("hello", request_id="watched", max_tokens=4000)
        next(iter(stream))
        outcome = triptych("top", run_dir, "--once")
        stream.abort()
    assert (outcome.code, outcome.err) == (0, "")
    assert "watched" in outcome.out
    assert "● healthy · hash-lm" in outcome.out


def test_pipeline_of_another_version_is_shown_too(triptych: Triptych, run_dir: str) -> None:
    config = Path(run_dir, CONFIG_FILE)
    before = config.read_text(encoding="utf-8")
    try:
        config.write_text(before.replace('"max_queue"', '"queue_novelty"'), encoding="utf-8")
        outcome = triptych("top", run_dir, "--once")
    finally:
        config.write_text(before, encoding="utf-8")
    assert (outcome.code, outcome.err) == (0, "")


def test_running_pipelines_are_found(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(run_dir) in running_pipelines()
    for found, words in (([], "none of your pipelines is running here"), ([Path("/a"), Path("/b")], "several")):
        monkeypatch.setattr("triptych.launch.find.running_pipelines", lambda found=found: found)
        with pytest.raises(ConfigError, match=words):
            the_running_pipeline()
    monkeypatch.setattr("triptych.launch.find.running_pipelines", lambda: [Path("/a")])
    assert the_running_pipeline() == Path("/a")


@pytest.mark.parametrize("name", ["run", os.fsdecode(b"run\xff")], ids=["plain", "not UTF-8"])
def test_pipeline_with_two_workers_of_a_role_is_listed_once(tmp_path: Path, name: str) -> None:
    program = "print(flush=True); input()"
    command = [sys.executable, "-c", program, "triptych.workers.prepare", "--run-dir", str(tmp_path / name)]
    with ExitStack() as stack:
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()  # shortly after its start, a process has no command line
        assert running_pipelines().count(tmp_path / name) == 1


def test_frame_of_a_pipeline_with_a_stage_that_failed_has_the_exit_code_1(triptych: Triptych) -> None:
    with Driver("hash-lm", max_restarts=0) as driver:
        os.kill(pid_of(driver, "execute"), signal.SIGABRT)
        eventually(lambda: driver.health().status == "failed")
        outcome = triptych("top", str(driver.run_dir), "--once")
    assert (outcome.code, "execute is " in outcome.out) == (1, True)


def test_missing_terminal_is_reported(triptych: Triptych, run_dir: str) -> None:
    outcome = triptych("top", "--connect", run_dir)
    assert (outcome.code, "--once prints one frame" in outcome.err) == (2, True)


def test_missing_pipeline_is_an_error(triptych: Triptych, tmp_path: Path) -> None:
    outcome = triptych("top", tmp_path)
    assert (outcome.code, f"no pipeline runs in {tmp_path}" in outcome.err) == (2, True)


@pytest.mark.parametrize("keys", ["psq", "\x03"], ids=["q", "ctrl-c"])
def test_keys_work_and_the_terminal_is_restored(run_dir: str, keys: str) -> None:
    with terminal("top", run_dir, "--interval", "0.1") as screen:
        screen.see("healthy")
        screen.type(keys)
        assert screen.wait() == 0
        assert "\x1b[?1049l" in screen.raw  # the previous screen is back


def test_top_ends_with_its_pipeline() -> None:
    with Driver("hash-lm") as driver, terminal("top", str(driver.run_dir), "--interval", "0.1") as screen:
        screen.see("healthy")
        driver.stop()
        assert screen.wait() == 0
        assert "has ended" in screen.text
