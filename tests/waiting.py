"""Waiting for what another process does, without guessing how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T | None], *, timeout: float = 20.0, interval: float = 0.01) -> T:
    """The first true value of ``condition``.

    Raises:
        AssertionError: it was still false after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"still {value!r} after {timeout} s")
        time.sleep(interval)
    return value
