"""The compiled kernels as Python functions."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

from ....protocol.system_calls import memfd_create
from .compile import NoCompiler, NoPlace, build_library, levels_to_try
from .structures import (
    DeltaLayer,
    DeltaShape,
    Expert,
    Layer,
    Matrix,
    Model,
    Sharing,
    StateSpaceLayer,
    StateSpaceShape,
    Step,
    Update,
)

logger = logging.getLogger(__name__)

_RECURRENT = (c_float, *[c_void_p] * 2, *[c_int32] * 3, *[c_void_p] * 3)  # eps, inputs, and how they are cut
_FUNCTIONS = {
    "triptych_sizes": (None, [POINTER(c_int64)]),
    "triptych_pack": (c_int32, [POINTER(Matrix), c_void_p, c_int32, c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "triptych_pack_int4": (None, [POINTER(Matrix), c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "triptych_pack_mxfp4": (None, [POINTER(Matrix), c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "triptych_unpack": (None, [POINTER(Matrix), c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "triptych_pack_screen": (c_int32, [POINTER(Matrix), c_void_p, c_int32, c_int32, c_int32, c_void_p]),
    "triptych_multiply": (c_int32, [POINTER(Matrix), c_void_p, c_int32, c_void_p]),
    "triptych_delta_rule": (c_int32, [POINTER(DeltaShape), POINTER(DeltaLayer), *_RECURRENT]),
    "triptych_state_space": (c_int32, [POINTER(StateSpaceShape), POINTER(StateSpaceLayer), *_RECURRENT]),
    "triptych_decoder_new": (c_void_p, [POINTER(Model), POINTER(Sharing)]),
    "triptych_decoder_delete": (None, [c_void_p]),
    "triptych_decoder_reserve": (c_int32, [c_void_p, c_int32]),
    "triptych_decoder_submit": (c_int32, [c_void_p, POINTER(Step)]),
    "triptych_decoder_wait": (c_int32, [c_void_p]),
    "triptych_decoder_show_progress": (None, [c_void_p, c_void_p]),
}


class Kernels(ctypes.CDLL):
    """The library. Calls release the GIL."""

    level: str


def load_library(wanted: str = "auto", *, spare_cache: Path | None = None) -> Kernels:
    """The kernels of that level, or the fastest that this processor can run and this compiler can build; see
    ``compile.build_library`` for ``spare_cache``.

    Raises:
        ConfigError: see ``compile.levels_to_try``.
        NoCompiler: see ``compile.build_library``.
    """
    failures: list[NoCompiler] = []
    for each in levels_to_try(wanted):
        try:
            library = _prepared(_open(each, spare_cache), each)
        except NoPlace:
            raise
        except NoCompiler as error:
            failures.append(error)
            continue
        if failures:
            logger.warning("using the %s kernels, faster ones cannot be compiled: %s", each, failures[0])
        return library
    raise failures[0]


def _open(level: str, spare_cache: Path | None = None) -> Kernels:
    """Recompiles a cached library that cannot be loaded: truncated by a full disk, or from another system."""
    library = build_library(level, spare_cache=spare_cache)
    try:
        return _load(library)
    except OSError as error:
        logger.warning("compiling the kernels again: %s", error)
    with contextlib.suppress(OSError):
        library.unlink()
    try:
        return _load(build_library(level, spare_cache=spare_cache))
    except OSError as error:
        raise NoCompiler(f"the kernels cannot be loaded: {error}") from error


def _load(library: Path) -> Kernels:
    if not os.statvfs(library).f_flag & os.ST_NOEXEC:
        return Kernels(str(library))
    # No code may run from that file system, as mostly from /dev/shm in a container: it runs from a copy in memory. Its
    # descriptor stays open, because the linker takes what has the name of a loaded library for the same one.
    copy = memfd_create(library.name)
    with open(copy, "wb", closefd=False) as file:
        file.write(library.read_bytes())
    return Kernels(f"/proc/self/fd/{copy}")


def _prepared(library: Kernels, level: str) -> Kernels:
    library.level = level
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    sizes = (c_int64 * 7)()
    library.triptych_sizes(sizes)
    expected = [ctypes.sizeof(structure) for structure in (Matrix, Layer, Model, Sharing, Step, Update, Expert)]
    assert list(sizes) == expected, f"structures.py has {expected} bytes, abi.h {list(sizes)}"
    return library
