"""The KV pool in memory that outlives this process, so that a restart need not compute anew what is in it.

The driver holds a file in memory (memfd) and this process maps it: a header, a record of what each page holds
(``scheduling/page_records.py``), and the pages. The next process continues with them if it has the same model, in the
same form, computed by the same kernels. After a death by its own fault the driver empties the file, as it cannot be
known what was written to it.
"""

from __future__ import annotations

import mmap
import os
from functools import partial

import numpy as np

from .kernels.memory import HUGE_PAGE, Arena, MakeArena, padded
from .lasting_file import HEADER_BYTES, LastingFile
from .scheduling.page_records import Columns, PageRecords, num_bytes_of


class KvFile(LastingFile):
    """One file, for one pool."""

    magic = b"triptych kv 1"
    what = "keys and values"

    def __init__(self, file: int) -> None:
        super().__init__(file)
        self.records: PageRecords | None = None  # once there is an arena
        self.is_new = True  # that arena has no pages of an earlier process

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
            self._note_failure(error)
            return Arena(num_bytes)
        finally:
            os.close(self._file)

    def _map(self, num_bytes: int, *, num_pages: int, page_size: int, key: str) -> Arena:
        shape = np.array([num_pages, page_size, num_bytes], np.int64).tobytes()
        header = self._header(shape + key.encode())
        records_bytes = num_bytes_of(num_pages, page_size)
        start = padded(HEADER_BYTES + records_bytes, HUGE_PAGE)
        self.is_new = not self._begins_with(header)
        if self.is_new:
            self._empty(start + padded(num_bytes, HUGE_PAGE))
        head = np.frombuffer(mmap.mmap(self._file, start), np.uint8)
        arena = Arena(num_bytes, self._file, start)
        self.records = PageRecords(Columns.of(head[HEADER_BYTES:][:records_bytes], num_pages, page_size))
        if self.is_new:
            os.pwrite(self._file, header, 0)
        return arena
