"""Waiting for what another process does, without guessing how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


SOON_S, LATER_S = 0.005, 0.05  # between two polls, at first and later: polling slows down what is waited for


def eventually(condition: Callable[[], T | None], *, timeout: float = 60.0, interval: float = SOON_S) -> T:
    """The first true value of ``condition``, polled at growing intervals.

    A long ``timeout`` costs only a test that fails: two seconds of imports take twenty where many programs run.

    Raises:
        AssertionError: it was still false after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"still {value!r} after {timeout} s")
        time.sleep(interval)
        interval = max(interval, min(1.2 * interval, LATER_S))
    return value
