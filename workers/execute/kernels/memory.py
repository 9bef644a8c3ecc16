"""Memory for weights and pages: zeroed, on huge pages if the system has them, and freed as a whole."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 2 << 20
_CACHE_LINE = 64
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25  # since Linux 5.14 and 6.1; the mmap module does not have them
_MAP_FIXED = 0x10


class Arena:
    """One mapping, handed out piece by piece. Pages that are never touched take no memory.

    Huge pages matter: a decode step reads every weight once, and with small pages TLB misses would dominate.
    """

    def __init__(self, num_bytes: int, file: int | None = None, offset: int = 0) -> None:
        """``file`` is a descriptor of memory that other processes share, from ``offset`` on, a multiple of HUGE_PAGE;
        None: this process has the memory alone.

        Raises:
            OSError: there is not enough address space, or the file cannot be mapped.
        """
        # Private: a shared mapping, the default, is backed by tmpfs, which rarely has huge pages by itself.
        memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = np.frombuffer(memory, np.uint8)  # keeps the mapping alive
        self._end = -self._bytes.ctypes.data % HUGE_PAGE
        self._limit = self._end + num_bytes
        if file is not None:
            _map_over(self._bytes[self._end : self._limit], file, offset)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the kernel has none
                memory.madvise(mmap.MADV_HUGEPAGE)

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
    MADV_POPULATE_WRITE and MADV_COLLAPSE.
    """
    end, start = address + num_bytes, address // mmap.PAGESIZE * mmap.PAGESIZE
    # Memory of a file has small pages by default (shmem_enabled is "never"). Once there is one, whatever the system's
    # settings, a huge page can take its place and that of the 511 that are not there yet. This may fail.
    for huge_page in range(address // HUGE_PAGE * HUGE_PAGE, end, HUGE_PAGE):
        if _madvise(max(huge_page, start), mmap.PAGESIZE, _MADV_POPULATE_WRITE) != 0:
            return False
        _madvise(huge_page, HUGE_PAGE, _MADV_COLLAPSE)
    return bool(_madvise(start, end - start, _MADV_POPULATE_WRITE) == 0)


def _map_over(place: npt.NDArray[np.uint8], file: int, offset: int) -> None:
    """Replace a mapping by that of a file: the mmap module cannot choose an address, and a huge page must begin at a
    multiple of its size both in the file and in memory.
    """
    address, flags = place.ctypes.data, mmap.MAP_SHARED | _MAP_FIXED
    if _mmap(address, len(place), mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_libc = ctypes.CDLL(None, use_errno=True)
_madvise, _mmap = _libc.madvise, _libc.mmap
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mmap.restype = ctypes.c_void_p


def padded(count: int, multiple: int = 64) -> int:
    return -(-count // multiple) * multiple
