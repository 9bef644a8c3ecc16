"""Files that only their owner can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triptych.protocol.private_file import write_private


def fail(*_: object) -> None:
    raise OSError("killed")


def test_private_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    write_private(tmp_path / "config.json", "old")
    write_private(tmp_path / "config.json", "né")
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == "né"
    assert (tmp_path / "config.json").stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 1


def test_private_file_is_replaced_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_private(tmp_path / "config.json", "old")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="killed"):
        write_private(tmp_path / "config.json", "new")
    assert (tmp_path / "config.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1, "what is left of the new one may fill the disk"
