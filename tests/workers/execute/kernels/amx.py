"""The kernels for AMX on processors that lack it: their instructions are computed by a signal handler."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import pytest

from tests.workers.execute.kernels.partial import PRODUCTS_OF_BYTES, load_partial
from triptych.workers.execute.kernels import compile as compiling
from triptych.workers.execute.kernels.compile import LEVELS, available_levels
from triptych.workers.execute.kernels.library import Kernels
from triptych.workers.execute.kernels.structures import Format

LEVEL = "amx"
IS_EMULATED = LEVEL not in available_levels() and "avx512" in available_levels()
FORMATS = (Format.BFLOAT16, Format.INT8)  # whose products are in tiles


@cache
def load_emulated() -> Kernels:
    """From now on, this process executes the instructions."""
    if not compiling._knows(compiling._compiler(), *compiling._options([*LEVELS[LEVEL]])):
        pytest.skip("the compiler does not know AMX")
    kernels = load_partial(LEVEL, PRODUCTS_OF_BYTES, beside=[Path(__file__).with_name("amx_emulator.cpp")])
    kernels.amx_count_products.restype = kernels.amx_count_in_use.restype = ctypes.c_int64
    assert kernels.amx_install() == 0
    return kernels
