"""The rate at which tokens arrive."""

from __future__ import annotations

import time
from collections import deque


class Rate:
    """Tokens per second over the last two seconds."""

    WINDOW_S = 2.0

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, count: int) -> None:
        self._samples.append((time.monotonic(), count))
        self._sum += count
        self._drop_old()

    def per_second(self) -> float:
        self._drop_old()
        return self._sum / self.WINDOW_S

    def _drop_old(self) -> None:
        oldest = time.monotonic() - self.WINDOW_S
        while self._samples and self._samples[0][0] < oldest:
            self._sum -= self._samples.popleft()[1]
