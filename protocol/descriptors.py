"""Descriptors of files that nothing else may write to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_LAST_STREAM = 2  # standard error


@contextlib.contextmanager
def beyond_standard_streams() -> Iterator[None]:
    """Whatever is opened inside gets none of the descriptors 0, 1 and 2.

    A program that has closed them, as daemons do, still prints: its warnings, and what a library says before it
    aborts, would be written over the beginning of a file that was given one of them.
    """
    taken = []
    try:
        while (file := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= _LAST_STREAM:
            taken.append(file)
        os.close(file)
        yield
    finally:
        for file in taken:
            os.close(file)
