"""Memory for weights and pages: zeroed, on huge pages if the system has them, and freed as a whole."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 2 << 20
_CACHE_LINE = 64
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25  # since Linux 5.14 and 6.1; the mmap module does not have them
_MAP_FIXED = 0x10
_MOST_THREADS = 8  # that provide huge pages at once, of which each writes 2 MiB of zeros


class Arena:
    """One mapping, handed out piece by piece. Pages that are never touched take no memory.

    Huge pages matter: a decode step reads every weight once, and with small pages TLB misses would dominate.
    """

    is_filled = False  # its contents are there, and can only be read

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
        self._start, self._limit = self._end, self._end + num_bytes
        if file is not None:
            _map_over(self._bytes[self._start : self._limit], file, offset, mmap.PROT_READ | mmap.PROT_WRITE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the kernel has none
                memory.madvise(mmap.MADV_HUGEPAGE)

    def fill_from(self, file: int, offset: int) -> None:
        """Replace the memory by that of a file which is open for reading only: nothing in this process can write there
        then, not even after mprotect(2).

        Raises:
            OSError: the file cannot be mapped, and nothing has changed.
        """
        _map_over(self._bytes[self._start : self._limit], file, offset, mmap.PROT_READ)
        self._bytes.flags.writeable = False
        self.is_filled = True

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The next bytes, aligned to a cache line."""
        start, self._end = self._end, self._end + padded(num_bytes, _CACHE_LINE)
        assert self._end <= self._limit, f"{self._end - self._limit} bytes too many"
        return self._bytes[start : start + num_bytes]

    def floats(self, count: int) -> npt.NDArray[np.float32]:
        return self.take(4 * count).view(np.float32)


class HugeArena(Arena):
    """Memory of a file in huge pages: one is provided as soon as part of it is handed out."""

    def __init__(self, num_bytes: int, file: int, offset: int) -> None:
        """``num_bytes`` is a multiple of HUGE_PAGE.

        Raises:
            OSError: see ``Arena``; or a file has no huge pages here, as before Linux 6.1.
        """
        super().__init__(num_bytes, file, offset)
        self._provided = self._start
        if not _make_huge(self._bytes[self._start :].ctypes.data):
            raise OSError(ctypes.get_errno(), f"memory of a file has no huge pages: {os.strerror(ctypes.get_errno())}")

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        taken = super().take(num_bytes)
        pages = range(self._provided, self._end, HUGE_PAGE)
        if pages:
            self._provided = pages[-1] + HUGE_PAGE
            memory = self._bytes.ctypes.data
            num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
            with ThreadPoolExecutor(num_threads) as pool:  # where it fails, there will be small pages
                deque(pool.map(lambda page: _make_huge(memory + page), pages), maxlen=0)
        return taken


MakeArena: TypeAlias = Callable[[int], Arena]  # of so many bytes


def populate(address: int, num_bytes: int) -> bool:
    """Make the system provide the memory now that it would otherwise provide at the first write; contents stay.

    Returns whether it did: not on an old system, nor if there is too little memory. Releases the GIL. See madvise(2),
    MADV_POPULATE_WRITE and MADV_COLLAPSE.
    """
    end, start = address + num_bytes, address // mmap.PAGESIZE * mmap.PAGESIZE
    for huge_page in range(address // HUGE_PAGE * HUGE_PAGE, end, HUGE_PAGE):
        _make_huge(huge_page, start)
    return bool(_madvise(start, end - start, _MADV_POPULATE_WRITE) == 0)


def _make_huge(address: int, least: int = 0) -> bool:
    """Provide the huge page at ``address``, of which this process may use what is not below ``least``. Whether it did.

    Memory of a file has small pages by default (shmem_enabled is "never"). Once there is one, whatever the system's
    settings, a huge page can take its place and that of the 511 that are not there yet.
    """
    if _madvise(max(address, least), mmap.PAGESIZE, _MADV_POPULATE_WRITE) != 0:
        return False
    return bool(_madvise(address, HUGE_PAGE, _MADV_COLLAPSE) == 0)


def _map_over(place: npt.NDArray[np.uint8], file: int, offset: int, protection: int) -> None:
    """Replace a mapping by that of a file: the mmap module cannot choose an address, and a huge page must begin at a
    multiple of its size both in the file and in memory.
    """
    address, flags = place.ctypes.data, mmap.MAP_SHARED | _MAP_FIXED
    if _mmap(address, len(place), protection, flags, file, offset) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_libc = ctypes.CDLL(None, use_errno=True)
_madvise, _mmap = _libc.madvise, _libc.mmap
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mmap.restype = ctypes.c_void_p


def padded(count: int, multiple: int = 64) -> int:
    return -(-count // multiple) * multiple
