"""Operations on a running pipeline: its clients notice a pause at most."""

from __future__ import annotations

import shutil
import socket
import stat
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.pipeline.checks import assert_quiet, expected
from tests.pipeline.conftest import hash_driver
from tests.tiny import prove
from tests.waiting import eventually
from triptych import Driver
from triptych.driver import replacing
from triptych.driver.control import ask
from triptych.protocol.board import ROLES
from triptych.protocol.config import DEMO_CHECKPOINT
from triptych.protocol.errors import ConfigError


@pytest.mark.parametrize("role", ROLES)
def test_worker_is_replaced_without_a_client_error(driver: Driver, role: str) -> None:
    streams = [driver.submit([i + 1, 5], max_tokens=2000) for i in range(3)]
    next(iter(streams[0]))
    pid = driver.pids[role]
    assert ask(driver.run_dir, "restart", role=role)["seconds"] > 0
    assert driver.pids[role] != pid
    for index, stream in enumerate(streams):
        assert stream.result(60).token_ids == expected([index + 1, 5], 2000)


def test_invalid_question_gets_an_answer(driver: Driver) -> None:
    with pytest.raises(ConfigError, match="role is 'nobody', known are: prepare, execute, summarize"):
        ask(driver.run_dir, "restart", role="nobody")
    with pytest.raises(ConfigError, match="unknown question 'sing', known are: "):
        ask(driver.run_dir, "sing")
    with pytest.raises(ConfigError, match="only execute has a model"):
        ask(driver.run_dir, "restart", role="prepare", model="x")
    with socket.socket(socket.AF_UNIX) as half:  # connects, and sends nothing
        half.connect(str(driver.run_dir / "control"))
        assert ask(driver.run_dir, "health")["status"] in ("ok", "degraded")
    assert stat.S_IMODE((driver.run_dir / "control").stat().st_mode) == 0o600


def test_question_without_a_driver_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no driver responds in"):
        ask(tmp_path, "health")


def test_health_is_measured_by_progress() -> None:
    with hash_driver(hang_s=30.0) as driver:
        health = driver.health()
        assert (health.status, health.reason) == ("ok", "")
        assert health.workers["execute"].since_progress_s < 5
        driver.restart("execute")
        eventually(lambda: driver.health().status == "starting")
        assert "execute is" in (driver.health().reason or "execute is")
        eventually(lambda: driver.healthy)
        assert driver.health().workers["execute"].epoch == 2


def replace_too_late(running: replacing.Running, role: str, **_: float) -> None:
    """The timeout passes while the model is loaded."""
    board, before = running.board, running.board.epoch(role)
    running.supervisor.restart(role)
    eventually(lambda: board.epoch(role) > before and board.phase(role) == "loading")
    raise ConfigError("it was too late")


def test_replacement_that_is_too_late_is_not_used(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(replacing, "replace_worker", replace_too_late)
        with pytest.raises(ConfigError, match="it was too late"):
            driver.replace("execute", model="demo")
    eventually(lambda: driver.healthy, timeout=60)
    assert driver.config.model.model == driver.info()["model"]["model"] == "hash-lm"
    assert driver.generate([1, 5], max_tokens=3).token_ids == expected([1, 5], 3)


@pytest.mark.slow
def test_weights_are_reloaded_without_a_client_error(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(DEMO_CHECKPOINT, other)
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if "norm" in name)
    save_file({**weights, name: weights[name] * 1.5}, other / "model.safetensors", metadata={"format": "pt"})
    prove(other)
    with Driver("demo", num_pages=256, lease_s=60.0, threads=1, max_restarts=1000) as driver:
        before = driver.generate("def main", max_tokens=30, temperature=0.0).token_ids
        stream = driver.submit("def main", max_tokens=400, temperature=0.0, ignore_eos=True)
        next(iter(stream))
        driver.replace("execute", model=str(other))
        assert len(stream.result(60).token_ids) == 400
        assert driver.info()["model"]["model"] == str(other)
        assert driver.generate("def main", max_tokens=30, temperature=0.0).token_ids != before
        # Weights with another tokenizer are refused in the same way: tests/workers/execute/model/guard/test_proof.py.
        with pytest.raises(ConfigError, match="the new execute failed"):
            driver.replace("execute", model=str(tmp_path / "nothing"))
        eventually(lambda: driver.healthy, timeout=60)
        assert driver.info()["model"]["model"] == str(other)
        assert driver.generate("x", max_tokens=3, ignore_eos=True).finish_reason == "length"
        assert_quiet(driver)
