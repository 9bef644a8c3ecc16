"""Pages in the memory of the host: of sequences that were swapped out, and of prefixes that were evicted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from .pages import PageLedgerError
from .prefix import PageNode


class HostPool:
    """Host pages 0..num_pages-1.

    Invariant: a host page is free, in one ``host_table``, or holds one evicted prefix.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))
        self._prefixes: OrderedDict[int, PageNode] = OrderedDict()  # the least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_prefixes(self) -> int:
        return len(self._prefixes)

    @property
    def num_available(self) -> int:
        """Pages that can be had at once. Sequences go before prefixes: who was swapped out is waited for."""
        return len(self._free) + len(self._prefixes)

    @property
    def oldest_prefix(self) -> PageNode | None:
        return next(iter(self._prefixes.values()), None)

    def allocate(self, num_pages: int) -> list[int]:
        """Free pages; the caller has dropped as many prefixes as that takes."""
        if num_pages > len(self._free):
            raise PageLedgerError(f"{num_pages} host pages asked for, {len(self._free)} are free")
        return [self._free.pop() for _ in range(num_pages)]

    def free(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)

    def put(self, node: PageNode) -> int:
        """The free host page to which the content of ``node`` goes."""
        (page,) = self.allocate(1)
        self._prefixes[page] = node
        node.host_page = page
        return page

    def take(self, node: PageNode) -> int:
        """The host page of ``node``, which is free now; its content stays until the next swap-out."""
        page = node.host_page
        assert page is not None, f"{node.depth} pages down, nothing is on the host"
        del self._prefixes[page]
        node.host_page = None
        self.free([page])
        return page

    def check(self, host_tables: Iterable[Iterable[int]], nodes: Iterable[PageNode]) -> None:
        """Proves the invariant.

        Raises:
            PageLedgerError: names the host pages for which it does not hold.
        """
        held = {node.host_page: node for node in nodes if node.host_page is not None}
        if held != self._prefixes:
            raise PageLedgerError(f"host pages {held.keys() ^ self._prefixes.keys()} are not what the index says")
        counts = Counter(page for pages in (self._free, held, *host_tables) for page in pages)
        wrong = [page for page in range(self.num_pages) if counts[page] != 1]
        if wrong:
            raise PageLedgerError(f"host pages {wrong} are lost, or held twice")
