"""The cache is bounded: the last used entries stay."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from triptych.protocol.config import ModelConfig
from triptych.workers.execute.kernels.cache import cache_folder, keep_newest, note_use
from triptych.workers.execute.model.guard import proof


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
