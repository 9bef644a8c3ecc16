"""Returning memory to the system that loading needed and serving does not."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable
from pathlib import Path

_DONT_NEED = 4  # MADV_DONTNEED: pages of a file are dropped, and read again when they are touched
_MAPS = Path("/proc/self/maps")


def forget_mapped(paths: Iterable[Path]) -> None:
    """Drop the pages of these files from this process's memory, wherever they are mapped. The mappings stay valid.

    Writes to private mappings are lost.
    """
    libc, files = _libc(), tuple(str(path.resolve()) for path in paths)
    if libc is None or not _MAPS.exists():
        return
    for line in _MAPS.read_text().splitlines():
        if not line.endswith(files):  # as most of thousands
            continue
        span, *_, path = line.split(maxsplit=5)
        if path in files:
            start, end = (int(address, 16) for address in span.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)


def trim_heap() -> None:
    """Return free heap memory to the system; loading a model leaves tens of MiB of it."""
    gc.collect()
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
