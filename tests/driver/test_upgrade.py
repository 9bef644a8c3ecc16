"""A pipeline whose package is upgraded while it runs goes on as long as its workers live, and then says why not."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import triptych
from tests.waiting import eventually
from triptych import Driver
from triptych.driver import fork_servers, upgrade
from triptych.driver.upgrade import Installation
from triptych.protocol.errors import ConfigError
from triptych.protocol.run_dir import CONFIG_FILE


@contextmanager
def upgraded(**options: Any) -> Iterator[Driver]:
    with Driver("hash-lm", **options) as driver, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Installation, "upgraded_to", lambda self: "99.0")
        patch.setattr(fork_servers, "FORK_S", 60.0)  # a machine so busy that it takes a second is not the subject
        yield driver


@pytest.fixture
def driver() -> Iterator[Driver]:
    with upgraded(fork_workers=False) as driver:
        yield driver


def kill(driver: Driver, role: str) -> int:
    pid = driver.pids[role]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def test_worker_of_another_version_that_cannot_start_is_tried_once(driver: Driver) -> None:
    """As one that cannot read the settings. It was started again and again, and the reason given was its exit code."""
    (driver.run_dir / CONFIG_FILE).write_text("not as this version writes it")
    kill(driver, "prepare")
    health = eventually(lambda: health if (health := driver.health()).status == "failed" else None)
    assert "Triptych was upgraded from 0.1.0 to 99.0 while this pipeline ran" in health.reason
    assert health.workers["prepare"].restarts == 2  # of the one that was killed, and of the one that failed


def test_worker_of_another_version_that_starts_goes_on(driver: Driver) -> None:
    old = kill(driver, "prepare")
    eventually(lambda: driver.pids["prepare"] not in (None, old) and driver.healthy)
    assert driver.generate([5], max_tokens=3).token_ids


def test_forked_worker_is_of_the_version_that_runs() -> None:
    """It does not end the pipeline by failing once, as one of another version does."""
    with upgraded() as driver:
        for _ in range(2):
            old = kill(driver, "prepare")
            eventually(lambda old=old: driver.pids["prepare"] not in (None, old) and driver.healthy)  # type: ignore[misc]
        (driver.run_dir / CONFIG_FILE).write_text("not as any version writes it")
        kill(driver, "prepare")
        health = eventually(lambda: health if (health := driver.health()).workers["prepare"].recent_deaths else None)
        assert health.status != "failed"
        assert "upgraded" not in health.workers["prepare"].last_death


def test_upgraded_worker_is_not_replaced_on_purpose(driver: Driver) -> None:
    before = driver.pids
    for replace in (driver.replace, driver.restart):
        with pytest.raises(ConfigError, match=r"upgraded from .* to 99.0 .* start it anew"):
            replace("prepare")
    assert driver.pids == before


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package on the disk, which is the one in memory."""
    for name in ("protocol", "workers/execute"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.py").write_text("x = 1")
    (tmp_path / "__init__.py").write_text('"""x"""\n__version__ = "0.1.0"\n')
    monkeypatch.setattr(triptych, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(upgrade, "__version__", "0.1.0")
    return tmp_path


@pytest.mark.parametrize(("text", "found"), [('__version__ = "99.0"\n', "99.0"), ("", "")], ids=["another", "empty"])
def test_version_on_the_disk_is_compared_with_the_one_in_memory(folder: Path, text: str, found: str) -> None:
    installation = Installation()
    assert installation.upgraded_to() == ""
    (folder / "__init__.py").write_text(text)
    assert installation.upgraded_to() == found


def test_package_that_is_gone_is_not_upgraded(folder: Path) -> None:
    installation = Installation()
    shutil.rmtree(folder)
    assert installation.upgraded_to() == ""


@pytest.mark.parametrize("change", ["edit", "add", "remove"])
def test_changed_sources_of_the_same_version_are_another_installation(folder: Path, change: str) -> None:
    """As after `git pull` in a checkout that is installed in place."""
    installation, file = Installation(), folder / "workers" / "execute" / "a.py"
    match change:
        case "edit":
            file.write_text("x = 22")
        case "add":
            file.with_name("b.py").touch()
        case "remove":
            file.unlink()
    with pytest.raises(ConfigError, match=r"Triptych was changed on the disk while .* start it anew"):
        installation.check()
