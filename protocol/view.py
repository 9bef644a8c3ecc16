"""What execute shows to live viewers, and only while there are any: its last steps, and which requests hold its pages.

Part of the board. A viewer stamps the time of each look; execute checks that stamp a few times a second, and does
nothing else while nobody looks.
"""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .board import WorkerPage

HEAD_BYTES = 64
WATCH_NS = 3_000_000_000  # how long a look counts


class View:
    """Any viewer writes the time of its look; only execute writes the rest."""

    def __init__(self, mapped: mmap.mmap, offset: int, shown: WorkerPage) -> None:
        self._watched_ns, self._shown_ns = np.frombuffer(mapped, "<u8", 2, offset)[:, None]
        self._shown = shown

    def look(self, since_ns: int = 0) -> dict[str, Any]:
        """What was shown last, empty if nothing was since then (CLOCK_MONOTONIC); asks for more."""
        self._watched_ns[0] = time.monotonic_ns()
        return self._shown.stats() if self._shown_ns[0] >= since_ns else {}

    @property
    def is_watched(self) -> bool:
        return time.monotonic_ns() - int(self._watched_ns[0]) < WATCH_NS

    def show(self, content: dict[str, Any]) -> None:
        self._shown.publish(content)
        self._shown_ns[0] = time.monotonic_ns()

    def close(self) -> None:
        del self._watched_ns, self._shown_ns
        self._shown.close()
