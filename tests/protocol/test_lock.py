"""Locks that end with the process that took them; for forks, see tests/driver/test_journal_keeper.py."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

from triptych.protocol.lock import LockFile


def test_released_lock_is_forgotten(tmp_path: Path) -> None:
    """Every driver opens some: what a fork has to close must not grow with them."""
    lock = LockFile(tmp_path / "lock", os.O_CREAT)
    released = weakref.ref(lock)
    lock.release()
    del lock
    gc.collect()
    assert released() is None
