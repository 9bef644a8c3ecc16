"""The kernels for AMX on processors that lack it: their instructions are computed by a signal handler.

Not all of the kernels are built, as that would take half a minute: decoders in bfloat16, and products in eight bits.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from triptych.workers.execute.kernels import compile as compiling
from triptych.workers.execute.kernels import library as libraries
from triptych.workers.execute.kernels.compile import LEVELS, SOURCES, available_levels
from triptych.workers.execute.kernels.library import Kernels
from triptych.workers.execute.kernels.structures import Format

LEVEL = "amx"
IS_EMULATED = LEVEL not in available_levels() and "avx512" in available_levels()
FORMATS = (Format.BFLOAT16, Format.INT8)  # whose products it computes
_HERE = Path(__file__).parent
_PARTS = ("library.cpp", "bfloat16.cpp")  # of the kernels, beside the headers


@cache
def load_emulated() -> Kernels:
    """From now on, this process executes the instructions. Compiled without most optimisations."""
    if not compiling._knows(compiling._compiler(), *compiling._options([*LEVELS[LEVEL]])):
        pytest.skip("the compiler does not know AMX")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for source in (*SOURCES.glob("*.h"), *(SOURCES / part for part in _PARTS), *_HERE.glob("amx_*.cpp")):
            shutil.copy(source, folder)
        patch.setattr(compiling, "SOURCES", Path(folder))
        patch.setattr(compiling, "_FLAGS", ["-O1" if flag == "-O3" else flag for flag in compiling._FLAGS])
        kernels = libraries._prepared(libraries._open(LEVEL), LEVEL)
    kernels.amx_count_products.restype = kernels.amx_count_in_use.restype = ctypes.c_int64
    assert kernels.amx_install() == 0
    return kernels
