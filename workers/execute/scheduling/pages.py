"""The pool of KV pages: which are free, which are kept for their content, and how many block tables name the others."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

TRASH_PAGE = 0  # padding writes here; never handed out


class PageLedgerError(Exception):
    """A page was freed twice, handed out twice, or lost. Always a bug of ours."""


class PagePool:
    """Pages 1..num_pages.

    Invariant: a page has as many references as entries name it. Without any it is idle, if its content was worth
    keeping, and otherwise free. An idle page can be shared again, or evicted to make room.
    """

    def __init__(self, num_pages: int, page_size: int, on_evict: Callable[[int], None] = lambda page: None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_refs = 0  # of all pages together
        self._on_evict = on_evict
        self._free = list(range(num_pages, 0, -1))  # a stack: the page that was freed last is used first
        self._refs = [0] * (num_pages + 1)
        self._kept: set[int] = set()
        # Kept and without a reference, the least recently used first. Not a dict: there the first entry is found by
        # walking over all that were deleted before it.
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

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Pages with one reference each: free ones, then the idle ones that nobody used for longest.

        Raises:
            PageLedgerError: fewer are available.
        """
        if num_pages > self.num_available:
            raise PageLedgerError(f"{num_pages} pages asked for, {self.num_available} are free")
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
        """One more reference for each of these pages.

        Raises:
            PageLedgerError: one of them is free.
        """
        for page in pages:
            if page in self._idle:
                del self._idle[page]
            else:
                self._require_held(page)
            self._refs[page] += 1
            self.num_refs += 1

    def free(self, pages: Sequence[int]) -> None:
        """One reference less for each of these pages of one sequence; a page that loses its last is free, or idle.

        The last page goes first, so that of a chain of idle pages the end is always evicted before what it hangs on.

        Raises:
            PageLedgerError: one of them is free already.
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
        """The content of this page is worth keeping when nobody holds it any more."""
        self._require_held(page)
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """The content of this page is not worth keeping any more; an idle page becomes free."""
        self._kept.discard(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def idle_pages(self) -> list[int]:
        """In the order in which they are evicted."""
        return list(self._idle)

    def check(self, tables: Iterable[Iterable[int]], limbo: Iterable[Iterable[int]]) -> None:
        """Proves that every page is free, idle or named, and counted as often as it is named. Looks at every page.

        Raises:
            PageLedgerError: names the first page for which that is not so.
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
            raise PageLedgerError(f"{self.num_refs} references are counted, there are {entries.total()}")

    def _require_held(self, page: int) -> None:
        if page == TRASH_PAGE or not self._refs[page]:
            raise PageLedgerError(f"page {page} is not held by anyone")
