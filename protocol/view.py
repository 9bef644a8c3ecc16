"""What execute shows to those who watch, and only while somebody does: its last steps, and who holds its pages.

A part of the board. A watcher says now and then that it looks; execute reads that word a few times a second, and where
nobody looks that is all it does.
"""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .board import WorkerPage

HEAD_BYTES = 64
WATCH_NS = 3_000_000_000  # a look counts for so long


class View:
    """Any watcher writes the time of its look, execute alone the rest."""

    def __init__(self, mapped: mmap.mmap, offset: int, shown: WorkerPage) -> None:
        self._watched_ns = np.frombuffer(mapped, "<u8", 1, offset)
        self._shown = shown

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
