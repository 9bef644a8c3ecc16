"""The pool of KV pages: free, idle (kept for their content), or in block tables, with reference counts."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

TRASH_PAGE = 0  # padding writes here; never handed out


class PageLedgerError(Exception):
    """A page was freed twice, handed out twice, or lost. Always a bug in this package."""


class PagePool:
    """Pages 1..num_pages.

    Invariant: a page has as many references as there are entries for it. Without references it is idle if its content
    is kept, and free otherwise. An idle page can be shared again, or evicted to make room.
    """

    def __init__(self, num_pages: int, page_size: int, on_evict: Callable[[int], None] = lambda page: None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_refs = 0  # of all pages together
        self._on_evict = on_evict
        self._free = list(range(num_pages, 0, -1))  # a stack: the page that was freed last is used first
        self._refs = [0] * (num_pages + 1)
        self._kept: set[int] = set()
        # Kept pages without references, the least recently used first. Not a dict: finding its first entry would walk
        # over all entries deleted before it.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages with a reference."""
        return self.num_pages - self.num_available

    def refs(self, page: int) -> int:
        return self._refs[page]

    def held(self, pages: Iterable[int]) -> list[int]:
        """Those of them that have a reference."""
        refs = self._refs
        return [page for page in pages if refs[page]]

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Pages with one reference each: free ones first, then the least recently used idle ones.

        Raises:
            PageLedgerError: not enough are available.
        """
        if num_pages > self.num_available:
            raise PageLedgerError(f"{num_pages} pages requested, {self.num_available} are free")
        while len(self._free) < num_pages:
            page = next(iter(self._idle))
            self.forget(page)
            self._on_evict(page)
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._refs[page] = 1
        self.num_refs += num_pages
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each of these pages.

        Raises:
            PageLedgerError: one of them is free.
        """
        refs, idle = self._refs, self._idle
        for page in pages:
            if not refs[page]:
                if page not in idle:
                    self._require_held(page)
                del idle[page]
            refs[page] += 1
            self.num_refs += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's pages; a page without references becomes free or idle.

        The last page goes first, so that in a chain of idle pages a page is always evicted before its predecessor.

        Raises:
            PageLedgerError: one of them is already free.
        """
        for page in reversed(pages):
            self._require_held(page)
            self._refs[page] -= 1
            self.num_refs -= 1
            if self._refs[page]:
                continue
            if page in self._kept:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """Keep the content of this page when it is no longer held."""
        self._require_held(page)
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """Stop keeping the content of this page; an idle page becomes free."""
        self._kept.discard(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def restore(self, pages: Iterable[int]) -> None:
        """These free pages, in eviction order, have content that is kept."""
        self._idle = OrderedDict.fromkeys(pages)
        self._kept = set(self._idle)
        self._free = [page for page in self._free if page not in self._kept]

    def idle_pages(self) -> list[int]:
        """In eviction order."""
        return list(self._idle)

    def check(self, tables: Iterable[Iterable[int]], limbo: Iterable[Iterable[int]]) -> None:
        """Check that every page is free, idle or in tables, with the right reference count. Visits every page.

        Raises:
            PageLedgerError: names the first page that violates this.
        """
        entries = Counter(page for table in (*tables, *limbo) for page in table)
        if entries.pop(TRASH_PAGE, 0):
            raise PageLedgerError("the trash page is in a block table")
        free = Counter(self._free)
        for page in range(1, self.num_pages + 1):
            is_idle = page in self._idle
            is_unheld = free[page] + is_idle == (not entries[page])
            if self._refs[page] != entries[page] or not is_unheld or (is_idle and page not in self._kept):
                raise PageLedgerError(
                    f"page {page} has {self._refs[page]} references, {entries[page]} entries, "
                    f"is {free[page]} times in the free list and {'' if is_idle else 'not '}idle"
                )
        if self.num_refs != entries.total():
            raise PageLedgerError(f"{self.num_refs} references are counted, there are {entries.total()} entries")

    def _require_held(self, page: int) -> None:
        if page == TRASH_PAGE or not self._refs[page]:
            raise PageLedgerError(f"page {page} is not held")
