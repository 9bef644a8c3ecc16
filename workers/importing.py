"""Imports of large libraries with the garbage collector paused."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NUMPY = "numpy"
TORCH = "torch"
TRANSFORMERS = "transformers"
MODELS = "transformers.modeling_utils"  # most of transformers, and most of its time


@contextmanager
def importing(library: str) -> Iterator[None]:
    """Put this around the statement that first imports ``library``; no effect if it is already imported.

    transformers creates a million objects, most of which stay. Collecting garbage among them over and over takes a
    quarter of a worker's start, and a tenth of the start of one that needs only numpy.
    """
    if library in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
