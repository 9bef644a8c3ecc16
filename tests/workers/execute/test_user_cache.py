"""The cache is bounded: the last used entries stay."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pwd
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from tests.waiting import eventually
from triptych.protocol.config import ModelConfig
from triptych.workers.execute.model.guard import proof
from triptych.workers.execute.user_cache import cache_folder, keep_newest, making, note_use


def test_last_used_entries_stay(tmp_path: Path) -> None:
    for age, name in enumerate("abcd"):
        (tmp_path / f"{name}.so").touch()
        os.utime(tmp_path / f"{name}.so", (1000 - age, 1000 - age))
    (tmp_path / "lock").touch()
    note_use(tmp_path / "d.so")
    keep_newest(tmp_path, "*.so", 2)
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.so", "d.so", "lock"}


def test_folder_is_removed_with_its_content(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "proof.json").touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    keep_newest(tmp_path, "???", 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["new"]


def test_missing_entry_is_no_error(tmp_path: Path) -> None:
    note_use(tmp_path / "gone")
    keep_newest(tmp_path / "no such folder", "*", 1)


def test_user_without_a_home_directory_has_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And starts without one: every use of the cache handles an ``OSError``."""

    def no_home(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_home)
    with pytest.raises(OSError, match="home"):
        cache_folder()
    monkeypatch.setattr(proof, "outcome_key", lambda *_: "key")
    assert proof.ProofStore(tmp_path, ModelConfig()).find(tmp_path) is None


def test_leftovers_of_killed_processes_are_deleted_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "making-dead.so-abcdefgh").mkdir()
    with making(tmp_path / "other.so") as other, making(tmp_path / "new.so") as new:
        assert other is not None
        assert new is not None
        assert sorted(path.name for path in tmp_path.glob("making-*")) == sorted((other.name, new.name))


def test_waiting_process_finds_it_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(1) as beside, making(tmp_path / "x") as folder:
        assert folder is not None
        waiting = beside.submit(_is_made, tmp_path / "x")
        eventually(lambda: "waiting for another process" in caplog.text)
        (tmp_path / "x").touch()
    assert waiting.result()
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_nothing_is_left_where_the_target_could_not_be_made(tmp_path: Path) -> None:
    with suppress(OSError), making(tmp_path / "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_process_that_waited_for_one_that_failed_excludes_those_that_come_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file that it waited for is no longer the one that they find."""
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(2) as beside:
        with making(tmp_path / "x"):
            second = beside.submit(_make, tmp_path / "x", may := threading.Event())
            eventually(lambda: "waiting for another process" in caplog.text)
        eventually(lambda: list(tmp_path.glob("making-x-*")))
        caplog.clear()
        third = beside.submit(_is_made, tmp_path / "x")
        eventually(lambda: "waiting for another process" in caplog.text)
        may.set()
        assert (second.result(), third.result()) == (True, True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def _make(target: Path, may: threading.Event) -> bool:
    with making(target) as folder:
        may.wait(60)
        target.touch()
        return folder is not None


def test_leftovers_of_a_process_that_was_killed_while_another_waited_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be as large as a model, and nothing else may ever be made in that folder."""
    lock = fcntl.flock

    def leave_something(file: IO[str], operation: int) -> None:
        lock(file, operation)
        if Path(file.name).name == "x.lock":  # the other process lets it go
            (tmp_path / "making-x-abcdefgh").mkdir(exist_ok=True)
            (tmp_path / "making-x-y-abcdefgh").mkdir(exist_ok=True)

    monkeypatch.setattr(fcntl, "flock", leave_something)
    with making(tmp_path / "x") as folder:
        assert folder is not None
        assert {path.name for path in tmp_path.glob("making-*")} == {folder.name, "making-x-y-abcdefgh"}


def _is_made(target: Path) -> bool:
    with making(target) as folder:
        return folder is None


def test_folder_without_locks_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with making(tmp_path / "x") as first, making(tmp_path / "x") as second:
        assert first is not None
        assert second is not None
        assert first.is_dir()
        assert second.is_dir()
