"""The kernels of every level that this machine can run, loaded once by each process of tests."""

from __future__ import annotations

from functools import cache

import pytest

from triptych.workers.execute.kernels import compile as compiling
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.library import Kernels, load_library


@cache
def load_cached(level: str) -> Kernels:
    """The others compute the same as the fastest, which is the one that users run. They are compiled in three fifths of
    the time, and tested as they are shipped on machines where they are the fastest.
    """
    with pytest.MonkeyPatch.context() as patch:
        if level != available_levels()[0]:
            patch.setattr(compiling, "_FLAGS", ["-O1" if flag == "-O3" else flag for flag in compiling._FLAGS])
        return load_library(level)
