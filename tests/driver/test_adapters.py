"""Adapters that were loaded while a pipeline ran are known to the next driver on its journal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.adapters import make_nominal_adapter
from triptych.driver.adapters import LoadedAdapters
from triptych.protocol.config import PipelineConfig


def test_list_of_loaded_adapters_survives_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was accepted for one of them, and is on the disk, could not be answered without it."""
    config, journal = PipelineConfig.from_options(model="hash-lm"), tmp_path / "journal"
    loaded, synced = LoadedAdapters(config), list[Path]()
    changed = loaded.add(config, "a", make_nominal_adapter(tmp_path / "a"))
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink()))
    loaded.keep(journal, changed)
    assert [path.parent for path in synced] == [tmp_path, tmp_path.parent]  # the new file, then its name
    assert LoadedAdapters(config).restore(journal, config) == changed
