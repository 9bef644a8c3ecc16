"""The kernels of every level that this machine can run, loaded once by each process of tests."""

from __future__ import annotations

from functools import cache
from itertools import product

from tests.workers.execute.kernels import amx, partial
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.library import Kernels, load_library
from triptych.workers.execute.kernels.structures import Format

FASTEST = available_levels()[0]
# Two levels with VNNI differ in bfloat16 only, so of the slower one only that is built.
_PARTLY_BUILT = "avx512_vnni" if FASTEST in ("amx", "avx512") else ""
WHOLE_LEVELS = [level for level in available_levels() if level != _PARTLY_BUILT]

# Of products.
LEVELS_AND_FORMATS = [
    *product(WHOLE_LEVELS, Format),
    *([(_PARTLY_BUILT, Format.BFLOAT16)] if _PARTLY_BUILT else []),
    *((amx.LEVEL, format_) for format_ in amx.FORMATS if amx.IS_EMULATED),
]


@cache
def load_cached(level: str) -> Kernels:
    """The others compute the same as the fastest, which is the one that users run. They are tested as they are shipped
    on machines where they are the fastest.
    """
    if level == amx.LEVEL and amx.IS_EMULATED:
        return amx.load_emulated()
    if level == _PARTLY_BUILT:
        return partial.load_partial(level)
    return load_library(level) if level == FASTEST else partial.load_whole(level)
