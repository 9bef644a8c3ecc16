"""The cache is bounded: what was used last stays."""

from __future__ import annotations

import os
from pathlib import Path

from triptych.workers.execute.kernels.cache import keep_newest, note_use


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    for age, name in enumerate("abcd"):
        (tmp_path / f"{name}.so").touch()
        os.utime(tmp_path / f"{name}.so", (1000 - age, 1000 - age))
    (tmp_path / "lock").touch()
    note_use(tmp_path / "d.so")
    keep_newest(tmp_path, "*.so", 2)
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.so", "d.so", "lock"}


def test_a_folder_goes_with_what_is_in_it(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "proof.json").touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    keep_newest(tmp_path, "???", 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["new"]


def test_what_is_gone_already_is_nobodys_loss(tmp_path: Path) -> None:
    note_use(tmp_path / "gone")
    keep_newest(tmp_path / "no such folder", "*", 1)
