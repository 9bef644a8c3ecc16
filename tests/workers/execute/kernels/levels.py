"""The kernels of every level that this machine can run, loaded once by each process of tests."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from tests.workers.execute.kernels import amx
from triptych.workers.execute.kernels import compile as compiling
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.library import Kernels, load_library
from triptych.workers.execute.kernels.structures import Format

# Of products.
LEVELS_AND_FORMATS = [
    *product(available_levels(), Format),
    *((amx.LEVEL, format_) for format_ in amx.FORMATS if amx.IS_EMULATED),
]

# Passes that only make code faster, without which the compiler is too.
_SLOW_PASSES = (
    "tree-pta", "tree-dominator-opts", "tree-dse", "tree-sink", "tree-loop-optimize", "if-conversion", "if-conversion2",
    "move-loop-invariants", "ipa-profile", "ipa-modref",
)  # fmt: skip
_QUICKLY = ["-O1", *(f"-fno-{name}" for name in _SLOW_PASSES)]


@cache
def load_cached(level: str) -> Kernels:
    """The others compute the same as the fastest, which is the one that users run. They are compiled in half the time,
    and tested as they are shipped on machines where they are the fastest.
    """
    if level == amx.LEVEL and amx.IS_EMULATED:
        return amx.load_emulated()
    with pytest.MonkeyPatch.context() as patch:
        if level != available_levels()[0]:
            patch.setattr(compiling, "_FLAGS", [*(flag for flag in compiling._FLAGS if flag != "-O3"), *_QUICKLY])
        return load_library(level)
