"""The KV pool in memory that outlives this process, so that a restart need not compute anew what is in it.

The driver holds a file in memory (memfd) and this process maps it: a header, a record of what each page holds
(``scheduling/page_records.py``), and the pages. The next process continues with them if it has the same model, in the
same form, computed by the same kernels. After a death by its own fault the driver empties the file, as it cannot be
known what was written to it.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
from functools import partial
from pathlib import Path

import numpy as np

from .kernels.memory import HUGE_PAGE, Arena, MakeArena, padded
from .scheduling.page_records import Columns, PageRecords, num_bytes_of

logger = logging.getLogger(__name__)

_MAGIC = b"triptych kv 1"
_HEADER_BYTES = 4096


class KvFile:
    """One file, used by one process at a time, for one pool."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._begin = _MAGIC  # of the header
        self.records: PageRecords | None = None  # once there is an arena
        self.is_new = True  # that arena has no pages of an earlier process

    @classmethod
    def open(cls, path: Path) -> KvFile | None:
        """None, with a reason in the log, if this process cannot open it."""
        try:
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            logger.info("keys and values will not outlive this process: %s", error)
            return None

    def claim(self, model: str) -> None:
        """For this model: if there are pages of another one, their memory is given back now."""
        self._begin = _MAGIC + hashlib.blake2b(model.encode(), digest_size=32).digest()
        if os.pread(self._file, len(self._begin), 0) != self._begin:
            os.ftruncate(self._file, 0)

    def arenas(self, *, num_pages: int, page_size: int, key: str) -> MakeArena:
        """``arena`` for pages of known number and content."""
        return partial(self.arena, num_pages=num_pages, page_size=page_size, key=key)

    def arena(self, num_bytes: int, *, num_pages: int, page_size: int, key: str) -> Arena:
        """Memory for pages, with what an earlier process has left there; zeros if none has, or with another ``key``.

        If the file cannot have this size, it is memory that ends with this process.

        Raises:
            OSError: there is not enough address space.
        """
        try:
            return self._map(num_bytes, num_pages=num_pages, page_size=page_size, key=key)
        except OSError as error:  # as by RLIMIT_FSIZE
            logger.info("keys and values will not outlive this process: %s", error)
            return Arena(num_bytes)
        finally:
            os.close(self._file)

    def _map(self, num_bytes: int, *, num_pages: int, page_size: int, key: str) -> Arena:
        shape = np.array([num_pages, page_size, num_bytes], np.int64).tobytes()
        header = self._begin + hashlib.blake2b(shape + key.encode(), digest_size=32).digest()
        records_bytes = num_bytes_of(num_pages, page_size)
        start = padded(_HEADER_BYTES + records_bytes, HUGE_PAGE)
        self.is_new = os.pread(self._file, len(header), 0) != header
        if self.is_new:
            os.ftruncate(self._file, 0)
            os.ftruncate(self._file, start + padded(num_bytes, HUGE_PAGE))
        head = np.frombuffer(mmap.mmap(self._file, start), np.uint8)
        arena = Arena(num_bytes, self._file, start)
        self.records = PageRecords(Columns.of(head[_HEADER_BYTES:][:records_bytes], num_pages, page_size))
        if self.is_new:
            os.pwrite(self._file, header, 0)
        return arena
