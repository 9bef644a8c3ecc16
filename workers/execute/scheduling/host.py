"""Pages in the memory of the host: of sequences that were swapped out, and of prefixes that were evicted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from .pages import PageLedgerError
from .prefix import PageNode


class HostPool:
    """Host pages 0..num_pages-1.

    Invariant: a host page is free, holds one evicted prefix, or has as many references as there are host tables with
    it. A page of the device and one in a host table are *twins* as long as what is in one is in the other too, so that
    it need not be moved again. They part when the host page is free, or the other one is handed out anew.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))
        self._refs: dict[int, int] = {}  # of pages in host tables
        self._prefixes: OrderedDict[int, PageNode] = OrderedDict()  # the least recently used first
        self._on_host: dict[int, int] = {}  # page of the device -> its twin, which is in a host table
        self._on_device: dict[int, int] = {}  # the same, the other way round

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
        """Free pages with one reference each; the caller has dropped as many prefixes as that takes."""
        if num_pages > len(self._free):
            raise PageLedgerError(f"{num_pages} host pages asked for, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(num_pages)]
        self._refs.update(dict.fromkeys(pages, 1))
        return pages

    def share_twins(self, pages: Iterable[int]) -> list[int]:
        """The twins of these pages of the device, with one reference more each."""
        host_pages = [self._on_host[page] for page in pages]
        for page in host_pages:
            self._refs[page] += 1
        return host_pages

    def free(self, pages: Iterable[int]) -> None:
        """One reference less for each of these; a page that loses its last is free."""
        for page in pages:
            self._refs[page] -= 1
            if not self._refs[page]:
                del self._refs[page]
                self._free.append(page)
                self._on_host.pop(self._on_device.pop(page, -1), None)

    def put(self, node: PageNode) -> int:
        """The free host page to which the content of ``node`` goes."""
        page = self._free.pop()
        self._prefixes[page] = node
        node.host_page = page
        return page

    def take(self, node: PageNode) -> int:
        """The host page of ``node``, which is free now; its content stays until the next swap-out."""
        page = node.host_page
        assert page is not None, f"{node.depth} pages down, nothing is on the host"
        del self._prefixes[page]
        node.host_page = None
        self._free.append(page)
        return page

    def pair(self, page: int, host_page: int) -> None:
        """These two are twins from now on, and have no others."""
        self.part([page])
        self._on_host.pop(self._on_device.pop(host_page, -1), None)
        self._on_host[page], self._on_device[host_page] = host_page, page

    def part(self, pages: Iterable[int]) -> None:
        """These pages of the device get another content."""
        if self._on_host:
            for page in pages:
                self._on_device.pop(self._on_host.pop(page, -1), None)

    def twin(self, page: int) -> int | None:
        """The host page with the content of this one of the device."""
        return self._on_host.get(page)

    def twin_on_device(self, host_page: int) -> int | None:
        """The page of the device with the content of this one. Nobody may hold it any more."""
        return self._on_device.get(host_page)

    def check(self, host_tables: Iterable[Iterable[int]], nodes: Iterable[PageNode]) -> None:
        """Proves the invariant.

        Raises:
            PageLedgerError: names the host pages for which it does not hold.
        """
        held = {node.host_page: node for node in nodes if node.host_page is not None}
        if held != self._prefixes:
            raise PageLedgerError(f"host pages {held.keys() ^ self._prefixes.keys()} are not what the index says")
        entries = Counter(page for table in host_tables for page in table)
        if entries != self._refs:
            raise PageLedgerError(f"host pages are counted as {self._refs}, and named as {dict(entries)}")
        counts = Counter(page for pages in (self._free, held, entries) for page in pages)
        wrong = [page for page in range(self.num_pages) if counts[page] != 1]
        if wrong:
            raise PageLedgerError(f"host pages {wrong} are lost, or held twice")
        if any(page not in self._refs or self._on_host[twin] != page for page, twin in self._on_device.items()):
            raise PageLedgerError(f"twins {self._on_device} have no host page, or another")
