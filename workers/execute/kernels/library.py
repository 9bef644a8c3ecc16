"""The compiled kernels as Python functions."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_void_p

from .compile import available_levels, build_library
from .structures import Layer, Matrix, Model, Sharing, Step

_FUNCTIONS = {
    "triptych_sizes": (None, [POINTER(c_int64)]),
    "triptych_pack": (None, [c_int32, POINTER(Matrix), c_void_p, c_int32, c_int32, c_int32, c_int32, c_int32]),
    "triptych_multiply": (None, [c_int32, POINTER(Matrix), c_void_p, c_int32, c_void_p]),
    "triptych_decoder_new": (c_void_p, [POINTER(Model), POINTER(Sharing)]),
    "triptych_decoder_delete": (None, [c_void_p]),
    "triptych_decoder_reserve": (c_int32, [c_void_p, c_int32]),
    "triptych_decoder_submit": (c_int32, [c_void_p, POINTER(Step)]),
    "triptych_decoder_wait": (c_int32, [c_void_p]),
}


def load_library(level: str | None = None) -> ctypes.CDLL:
    """The kernels of that level, by default the fastest this processor runs. Calls give the interpreter free.

    Raises:
        NoCompiler: see ``compile.build_library``.
    """
    library = ctypes.CDLL(str(build_library(level or available_levels()[0])))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    sizes = (c_int64 * 5)()
    library.triptych_sizes(sizes)
    expected = [ctypes.sizeof(structure) for structure in (Matrix, Layer, Model, Sharing, Step)]
    assert list(sizes) == expected, f"structures.py has {expected} bytes, abi.h {list(sizes)}"
    return library
