"""What execute shows to those who watch, and only while somebody does: its last steps, and who holds its pages.

A mapped file of its own beside the board. A watcher says now and then that it looks; execute reads that word a few
times a second, and where nobody looks that is all it does.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from .board import PAGE, WorkerPage

WATCH_NS = 3_000_000_000  # a look counts for so long


class View:
    """The mapped file of one run directory. Any watcher writes the time of its look, execute alone the rest."""

    def __init__(self, run_dir: Path) -> None:
        file = os.open(run_dir / "view", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, 2 * PAGE)
            self._map = mmap.mmap(file, 0)
        finally:
            os.close(file)
        self._watched_ns = np.frombuffer(self._map, "<u8", 1)
        self._shown = WorkerPage(self._map, PAGE)

    def look(self) -> dict[str, Any]:
        """What was shown last, empty if there is nothing; asks for more of it."""
        self._watched_ns[0] = time.monotonic_ns()
        return self._shown.stats()

    @property
    def is_watched(self) -> bool:
        return time.monotonic_ns() - int(self._watched_ns[0]) < WATCH_NS

    def show(self, content: dict[str, Any]) -> None:
        self._shown.publish(content)

    def close(self) -> None:
        del self._watched_ns
        self._shown.close()
        self._map.close()
