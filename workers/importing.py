"""What a process needs, imported without looking for garbage among what stays."""

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
    """Around the statement that imports ``library`` first; one that is there already changes nothing.

    transformers makes a million objects. The collections that look at them, again and again, are a quarter of a start,
    and a tenth of one that needs numpy only.
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
