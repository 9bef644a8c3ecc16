"""What each page holds, recorded where the next process finds it: in memory that outlives this one.

A record is valid or not, and whatever the moment at which this process is killed, a valid one is true: it is written
once its page is computed, its check last, and the check is cleared before the page is given to anyone else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ....protocol.arrays import Bytes, Int32, UInt32, UInt64
from .pages import TRASH_PAGE
from .prefix import ROOT_KEY_BYTES, PageNode

_VALID = 1 << 32  # above the 32 bits of a check, so that no valid record has the check 0


class Columns(NamedTuple):
    """The memory of the records, one row for each page."""

    checks: UInt64  # [num_pages + 1]; 0: the record is not valid
    stamps: UInt64  # [num_pages + 1], greater than that of every page recorded before
    parents: UInt32  # [num_pages + 1], the page before it in its prefix; 0: it is the first
    parent_stamps: UInt64  # [num_pages + 1], to tell what that page held from what it holds now
    roots: Bytes  # [num_pages + 1, ROOT_KEY_BYTES], of a first page: what its prefix begins with
    tokens: Int32  # [num_pages + 1, page_size]

    @classmethod
    def of(cls, memory: Bytes, num_pages: int, page_size: int) -> Columns:
        """Views of ``memory``, [num_bytes], which begins at a multiple of 8 bytes."""
        num_rows = num_pages + 1
        wide, narrow = 3 * 8 * num_rows, 4 * num_rows
        checks, stamps, parent_stamps = memory[:wide].view(np.uint64).reshape(3, num_rows)
        parents = memory[wide:][:narrow].view(np.uint32)
        tokens = memory[wide + narrow :][: narrow * page_size].view(np.int32).reshape(num_rows, page_size)
        roots = memory[wide + narrow * (1 + page_size) :][: ROOT_KEY_BYTES * num_rows].reshape(num_rows, -1)
        return cls(checks, stamps, parents, parent_stamps, roots, tokens)


def num_bytes_of(num_pages: int, page_size: int) -> int:
    """Of the memory for ``Columns``."""
    return (num_pages + 1) * (3 * 8 + 4 + 4 * page_size + ROOT_KEY_BYTES)


class PageRecord(NamedTuple):
    """A page whose content is known."""

    page: int
    stamp: int
    parent: tuple[int, int] | bytes  # page and stamp of the one before it, or the key of the root
    tokens: bytes


class PageRecords:
    """Written by one process at a time."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._next_stamp = 1

    def note(self, node: PageNode) -> None:
        """The content of ``node`` is in its page, which had no valid record."""
        checks, stamps, parents, parent_stamps, roots, tokens = self._columns
        page, parent = node.page, node.parent
        assert parent is not None, "a root has no page"
        assert parent.page or parent.parent is None, f"the page before page {page} is not on the device"
        stamps[page], parents[page] = self._next_stamp, parent.page
        if parent.page:
            parent_stamps[page] = stamps[parent.page]
        else:
            roots[page] = np.frombuffer(parent.tokens, np.uint8)
        tokens[page] = np.frombuffer(node.tokens, np.int32)
        self._next_stamp += 1
        checks[page] = self._check(page)

    def forget(self, page: int) -> None:
        """The page gets another content, or its content is of no use."""
        self._columns.checks[page] = 0

    def read(self) -> Iterator[PageRecord]:
        """The valid ones, in the order in which they were written. What is noted from now on is later than these."""
        _, stamps, parents, parent_stamps, roots, tokens = self._columns
        pages = np.flatnonzero(self._columns.checks)
        pages = pages[np.argsort(stamps[pages])]
        if len(pages):
            self._next_stamp = int(stamps[pages[-1]]) + 1
        for page in pages.tolist():
            if page == TRASH_PAGE or int(self._columns.checks[page]) != self._check(page):
                self.forget(page)
                continue
            parent = (int(parents[page]), int(parent_stamps[page])) if parents[page] else roots[page].tobytes()
            yield PageRecord(page, int(stamps[page]), parent, tokens[page].tobytes())

    def _check(self, page: int) -> int:
        check = zlib.crc32(page.to_bytes(8, "little"))
        for column in self._columns[1:]:
            check = zlib.crc32(column[page].tobytes(), check)
        return _VALID | check
