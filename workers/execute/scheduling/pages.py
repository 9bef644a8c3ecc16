"""The pool of KV pages: which are free, and how many block tables name each of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

TRASH_PAGE = 0  # padding writes here; never handed out


class PageLedgerError(Exception):
    """A page was freed twice, handed out twice, or lost. Always a bug of ours."""


class PagePool:
    """Pages 1..num_pages.

    Invariant: a page is free, or its reference count is the number of entries that name it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages, 0, -1))  # a stack: the page that was freed last is used first
        self._num_refs = [0] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Free pages, each with one reference.

        Raises:
            PageLedgerError: fewer are free.
        """
        if num_pages > len(self._free):
            raise PageLedgerError(f"{num_pages} pages asked for, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._num_refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference for each of these pages.

        Raises:
            PageLedgerError: one of them is free.
        """
        for page in pages:
            self._require_held(page)
            self._num_refs[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """One reference less for each of these pages; the last one makes a page free.

        Raises:
            PageLedgerError: one of them is free already.
        """
        for page in pages:
            self._require_held(page)
            self._num_refs[page] -= 1
            if not self._num_refs[page]:
                self._free.append(page)

    def check(self, tables: Iterable[Iterable[int]], limbo: Iterable[Iterable[int]]) -> None:
        """Proves that every page is free or named, and counted as often as it is named. Looks at every page.

        Raises:
            PageLedgerError: names the first page for which that is not so.
        """
        entries = Counter(page for table in (*tables, *limbo) for page in table)
        if entries.pop(TRASH_PAGE, 0):
            raise PageLedgerError("the trash page is in a block table")
        free = Counter(self._free)
        for page in range(1, self.num_pages + 1):
            if self._num_refs[page] != entries[page] or free[page] != (not entries[page]):
                raise PageLedgerError(
                    f"page {page} has {self._num_refs[page]} references, {entries[page]} entries, "
                    f"and is {free[page]} times in the free list"
                )

    def _require_held(self, page: int) -> None:
        if page == TRASH_PAGE or not self._num_refs[page]:
            raise PageLedgerError(f"page {page} is not held by anyone")
