"""Pages in host memory: of swapped-out sequences, and of evicted prefixes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from .pages import PageLedgerError
from .prefix import PageNode


class HostPool:
    """Host pages 0..num_pages-1.

    Invariant: a host page is free, holds one evicted prefix, or has as many references as host tables contain it. A
    device page and a host page in a host table are *twins* while their contents are equal, so that neither needs to be
    moved again. Twins part when the host page becomes free or the device page is reallocated.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))
        self._refs: dict[int, int] = {}  # of pages in host tables
        self._prefixes: OrderedDict[int, PageNode] = OrderedDict()  # the least recently used first
        self._on_host: dict[int, int] = {}  # device page -> its twin, which is in a host table
        self._on_device: dict[int, int] = {}  # the inverse

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_prefixes(self) -> int:
        return len(self._prefixes)

    @property
    def num_available(self) -> int:
        """Pages available at once. Swapped-out sequences take precedence over prefixes, as clients wait for them."""
        return len(self._free) + len(self._prefixes)

    @property
    def oldest_prefix(self) -> PageNode | None:
        return next(iter(self._prefixes.values()), None)

    def allocate(self, num_pages: int) -> list[int]:
        """Free pages with one reference each; the caller must have dropped enough prefixes."""
        if num_pages > len(self._free):
            raise PageLedgerError(f"{num_pages} host pages requested, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(num_pages)]
        self._refs.update(dict.fromkeys(pages, 1))
        return pages

    def share_twins(self, pages: Iterable[int]) -> list[int]:
        """The twins of these device pages, each with one more reference."""
        host_pages = [self._on_host[page] for page in pages]
        for page in host_pages:
            self._refs[page] += 1
        return host_pages

    def free(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page; a page without references becomes free."""
        for page in pages:
            self._refs[page] -= 1
            if not self._refs[page]:
                del self._refs[page]
                self._free.append(page)
                self._on_host.pop(self._on_device.pop(page, -1), None)

    def put(self, node: PageNode) -> int:
        """Assign a free host page to the content of ``node``."""
        page = self._free.pop()
        self._prefixes[page] = node
        node.host_page = page
        return page

    def take(self, node: PageNode) -> int:
        """Free the host page of ``node``; its content stays there until the next swap-out."""
        page = node.host_page
        assert page is not None, f"the node at depth {node.depth} has no host page"
        del self._prefixes[page]
        node.host_page = None
        self._free.append(page)
        return page

    def pair(self, page: int, host_page: int) -> None:
        """Make these two pages twins, replacing earlier twins."""
        self.part([page])
        self._on_host.pop(self._on_device.pop(host_page, -1), None)
        self._on_host[page], self._on_device[host_page] = host_page, page

    def part(self, pages: Iterable[int]) -> None:
        """These device pages get new content."""
        if self._on_host:
            for page in pages:
                self._on_device.pop(self._on_host.pop(page, -1), None)

    def twin(self, page: int) -> int | None:
        """The host page with the same content as this device page."""
        return self._on_host.get(page)

    def twin_on_device(self, host_page: int) -> int | None:
        """The device page with the same content as this host page. It may no longer be held by any sequence."""
        return self._on_device.get(host_page)

    def check(self, host_tables: Iterable[Iterable[int]], nodes: Iterable[PageNode]) -> None:
        """Check the invariant.

        Raises:
            PageLedgerError: names the host pages that violate it.
        """
        held = {node.host_page: node for node in nodes if node.host_page is not None}
        if held != self._prefixes:
            raise PageLedgerError(f"host pages {held.keys() ^ self._prefixes.keys()} disagree with the index")
        entries = Counter(page for table in host_tables for page in table)
        if entries != self._refs:
            raise PageLedgerError(f"host pages have references {self._refs}, and entries {dict(entries)}")
        counts = Counter(page for pages in (self._free, held, entries) for page in pages)
        wrong = [page for page in range(self.num_pages) if counts[page] != 1]
        if wrong:
            raise PageLedgerError(f"host pages {wrong} are lost or held twice")
        if any(page not in self._refs or self._on_host[twin] != page for page, twin in self._on_device.items()):
            raise PageLedgerError(f"twins {self._on_device} have no host page or the wrong one")
