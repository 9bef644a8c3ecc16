"""Memory for weights and pages: zeroed, on huge pages if the system has them, and freed as a whole."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 2 << 20
_CACHE_LINE = 64
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; the mmap module does not have it


class Arena:
    """One mapping, handed out piece by piece. Pages that are never touched take no memory.

    Huge pages matter: a decode step reads every weight once, and with small pages TLB misses would dominate.
    """

    def __init__(self, num_bytes: int, memory: mmap.mmap | None = None) -> None:
        """``memory``: of a file, whose pieces are at the same places in every process; None: anonymous."""
        is_anonymous = memory is None
        if memory is None:
            # Private: a shared mapping, the default, is backed by tmpfs, which rarely has huge pages.
            memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the kernel has none
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(memory, np.uint8)  # keeps the mapping alive
        self._end = -self._bytes.ctypes.data % HUGE_PAGE if is_anonymous else 0
        self._limit = self._end + num_bytes

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The next bytes, aligned to a cache line."""
        start, self._end = self._end, self._end + padded(num_bytes, _CACHE_LINE)
        assert self._end <= self._limit, f"{self._end - self._limit} bytes too many"
        return self._bytes[start : start + num_bytes]

    def floats(self, count: int) -> npt.NDArray[np.float32]:
        return self.take(4 * count).view(np.float32)


MakeArena: TypeAlias = Callable[[int], Arena]  # of so many bytes


def populate(address: int, num_bytes: int) -> bool:
    """Make the system provide the memory now that it would otherwise provide at the first write; contents stay.

    Returns whether it did: not on an old system, nor if there is too little memory. Releases the GIL. See madvise(2),
    MADV_POPULATE_WRITE.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(_madvise(start, address + num_bytes - start, _MADV_POPULATE_WRITE) == 0)


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def padded(count: int, multiple: int = 64) -> int:
    return -(-count // multiple) * multiple
