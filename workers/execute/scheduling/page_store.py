"""The pages of device and host, what each of them holds, and the copies between them that the next step begins with.

A prefix that no sequence holds stays in place until its page is needed. It then moves to the host if the host has
pages, as do the computed pages of a swapped-out sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from .host import HostPool
from .limbo import Limbo
from .moves import Moves, MovesDraft
from .page_records import PageRecords
from .pages import PagePool
from .prefix import PageNode, PrefixIndex
from .states import StatePool


class PageStore:
    """Allocates pages, and reclaims those of finished sequences and of prefixes for it. Knows no sequences, but the
    block tables of those that swap.

    Invariant: every page of the device is free, idle (a cached prefix that no sequence holds), in limbo, or in a block
    table. A step swaps in one direction only; a swap-in prevented by swap-outs gets the next step.
    """

    def __init__(
        self, num_pages: int, page_size: int, num_host_pages: int, states: StatePool, records: PageRecords | None = None
    ) -> None:
        """``states``: snapshots end with the prefix at whose end they were taken. ``records``: of what an earlier
        process has left in the pages; they are kept up to date for the next one.
        """
        self.pool = PagePool(num_pages, page_size, self._evict)
        self.limbo = Limbo(self.pool)
        self.index = PrefixIndex(page_size)
        self.host = HostPool(num_host_pages)
        self._states = states
        self._moves = MovesDraft()
        self._is_kept_for_swap_in = False
        self._swap_in_is_wanted = False
        self._records = records
        if records is not None:
            assert not num_host_pages, "a page that is swapped in does not hold yet what it will"
            self._restore(records)

    def _restore(self, records: PageRecords) -> None:
        """Take over the pages whose content is known, and that of all pages before them in their prefix."""
        nodes: dict[tuple[int, int], PageNode] = {}  # by page and stamp: a node after its parent
        for page, stamp, before, tokens in records.read():
            parent = self.index.root(before) if isinstance(before, bytes) else nodes.get(before)
            if parent is None or tokens in parent.children:
                records.forget(page)
                continue
            node = nodes[page, stamp] = self.index.add(parent, tokens)
            self.index.put(node, page)
        # The latest page behind each, or itself. What has nothing late behind it is evicted first, a page before its
        # parent.
        latest: Counter[int] = Counter()
        for (page, stamp), node in reversed(nodes.items()):
            latest[page] = max(latest[page], stamp)
            if node.parent is not None:
                latest[node.parent.page] = max(latest[node.parent.page], latest[page])
        self.pool.restore(sorted((page for page, _ in reversed(nodes)), key=latest.__getitem__))

    @property
    def num_available(self) -> int:
        """Pages available at once: free ones, idle ones, and those in limbo that no step touches."""
        return self.pool.num_available + len(self.limbo.reclaimable())

    def has(self, num_pages: float) -> bool:
        """Whether this many pages are available at once. Limbo is searched only if the others do not suffice."""
        return num_pages <= self.pool.num_available or num_pages <= self.num_available

    def allocate(self, num_pages: int) -> list[int]:
        """Allocate this many pages, or as many as available."""
        self.limbo.reclaim(num_pages)
        pages = self.pool.allocate(min(num_pages, self.pool.num_available))
        self._moves.forget(pages)
        self.host.part(pages)
        return pages

    def copy(self, source: int, target: int) -> None:
        """The next step begins with a copy of a page."""
        self._moves.copy(source, target)

    def allocate_copy(self, node: PageNode) -> int:
        """Allocate a page, to which the content of ``node`` is copied from wherever it is."""
        source, host_page = node.page, node.host_page  # before the allocation, which may evict it
        (page,) = self.allocate(1)
        if source:
            self._moves.copy(source, page)
        else:
            assert host_page is not None, f"the node at depth {node.depth} is nowhere"
            self._moves.swap_in[page] = host_page
        return page

    def take_moves(self) -> Moves:
        """The page moves to do before the planned step; resets them for the next step."""
        moves = self._moves.finish()
        if moves:
            self._moves = MovesDraft()
        self._is_kept_for_swap_in, self._swap_in_is_wanted = self._swap_in_is_wanted, False
        return moves

    def num_in_use(self, pages: Iterable[int]) -> int:
        """How many of these pages are in use and cannot be reclaimed: ``num_available`` does not count them."""
        held = self.pool.held(pages)
        if not held:
            return 0
        reclaimable = self.limbo.reclaimable()
        return len(held) - sum(map(reclaimable.__contains__, held)) if reclaimable else len(held)

    # What pages hold.

    def learn(self, node: PageNode, page: int) -> None:
        """The content of ``node`` is in ``page``, and is kept when no sequence holds that."""
        if node.host_page is not None:
            self.host.take(node)
        self.index.put(node, page)
        self.pool.keep(page)
        if self._records is not None:
            self._records.note(node)

    def disown(self, entries: Counter[int]) -> None:
        """Remove the content of these pages from the index, unless a page has more holders than are counted here."""
        for page, count in entries.items():
            node = self.index.node_of(page)
            if node is not None and self.pool.refs(page) == count:
                self._remove(node)

    def _remove(self, node: PageNode) -> None:
        """Remove a node and all its descendants."""
        for gone in self.index.remove(node):
            if gone.page:
                self._forget(gone.page)
                self.pool.forget(gone.page)
            if gone.host_page is not None:
                self.host.take(gone)
            self._states.forget(gone)

    def _forget(self, page: int) -> None:
        if self._records is not None:
            self._records.forget(page)

    # On their way between device and host.

    @property
    def _may_swap_out(self) -> bool:
        return self.host.num_pages > 0 and not self._moves.swap_in and not self._is_kept_for_swap_in

    def request_swap_in(self) -> bool:
        """Whether this step may swap in; if not, the next one will not swap out."""
        self._swap_in_is_wanted |= bool(self._moves.swap_out)
        return not self._moves.swap_out

    def keep_for_swap_in(self) -> None:
        """This step swaps nothing out from here on."""
        self._is_kept_for_swap_in = True

    def swap_out(self, tables: Sequence[Sequence[int]]) -> list[list[int]] | None:
        """Move the pages of these block tables to the host; returns the host tables, or None if impossible now.

        A page that is in several of them is moved once. It is not moved at all if an earlier swapped-out sequence still
        has its content on the host.
        """
        moved = [page for page in dict.fromkeys(chain.from_iterable(tables)) if self.host.twin(page) is None]
        if not self._may_swap_out or not self._make_host_room(len(moved)):
            return None
        # NOTE: only beams of one search share a half-full page. They move together, so it is not written to while it
        # has a twin.
        host_pages = self.host.allocate(len(moved))
        for page, host_page in zip(moved, host_pages, strict=True):
            self._moves.swap(page, host_page)
            self.host.pair(page, host_page)
        host_tables = [self.host.share_twins(table) for table in tables]
        self.host.free(host_pages)
        return host_tables

    def swap_in(self, node: PageNode) -> None:
        """Bring back an evicted prefix."""
        (page,) = self.allocate(1)
        self._moves.swap_in[page] = self.host.take(node)
        self.learn(node, page)

    def swap_in_rest(self, table: list[int], host_table: list[int]) -> None:
        """Add to the block table, whose pages are the first ones of the host table, all of the others: those that are
        back on the device are shared. Frees the host table.
        """
        for page, host_page in zip(table, host_table, strict=False):
            self.host.pair(page, host_page)
        twins = {host_page: self.host.twin_on_device(host_page) for host_page in host_table[len(table) :]}
        places = {host_page: twin for host_page, twin in twins.items() if twin is not None and self.pool.refs(twin)}
        self.pool.share(places.values())
        away = [host_page for host_page in twins if host_page not in places]
        for host_page, page in zip(away, self.allocate(len(away)), strict=True):
            self._moves.swap_in[page] = host_page
            self.host.pair(page, host_page)
            places[host_page] = page
        table += [places[host_page] for host_page in twins]
        self.host.free(host_table)

    def _make_host_room(self, num_pages: int) -> bool:
        """Free this many host pages by dropping the least recently used prefixes; False if that is impossible."""
        if num_pages > self.host.num_available:
            return False
        while self.host.num_free < num_pages and (node := self.host.oldest_prefix):
            self._remove(node)
        return True

    def _evict(self, page: int) -> None:
        """The pool reclaims an idle page: move its content to the host if possible, otherwise forget it."""
        self._forget(page)
        node = self.index.take(page)
        assert node is not None, f"page {page} is idle and has no content"
        if self._may_swap_out and self._make_host_room(1):
            self._moves.swap_out.append((page, self.host.put(node)))
        else:
            self._remove(node)
