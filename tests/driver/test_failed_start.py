"""A start that fails says what helps, and leaves nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.protocol.factories import accept, make_journal
from triptych import Driver
from triptych.protocol import run_dir as run_dir_module
from triptych.protocol.errors import ConfigError
from triptych.protocol.journal.requests import RequestWriter
from triptych.protocol.run_dir import PREFIX, TEMPORARY_FILE, RunDir


def leave_requests(folder: Path) -> None:
    """As a driver that was killed leaves its run directory."""
    run_dir = RunDir(folder)
    journal = make_journal(run_dir.path)
    accept(RequestWriter(journal), journal)
    (run_dir.path / TEMPORARY_FILE).touch()
    run_dir.unlock()


@pytest.mark.parametrize("nth", [1, 2], ids=["journal", "board"])
def test_without_room_the_error_names_what_a_killed_driver_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    kept, allocate, calls = tmp_path / f"{PREFIX}kept", os.posix_fallocate, list[int]()
    leave_requests(kept)
    size = sum(path.stat().st_blocks * 512 for path in kept.iterdir())

    def allocate_or_fail(file: int, offset: int, size: int) -> None:
        calls.append(size)
        if len(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, offset, size)

    monkeypatch.setattr(run_dir_module, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", allocate_or_fail)
    with pytest.raises(ConfigError, match=f"{kept} takes {size} bytes.* --run-dir {kept} goes on with them.* remove"):
        Driver("hash-lm").start()
    assert list(tmp_path.iterdir()) == [kept]
