"""Page ownership in the KV cache: running sequences, finished sequences (in limbo), and cached prefixes.

A prefix that no sequence holds stays in place until its page is needed. It then moves to the host if the host has
pages, as do the computed pages of a swapped-out sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, takewhile

from .host import HostPool
from .limbo import Limbo
from .moves import Moves, MovesDraft
from .pages import PagePool
from .prefix import NO_MATCH, Match, PageNode, PrefixIndex
from .sequence import Key, Sequence
from .states import StatePool


class PageCache:
    """Gives pages to sequences and takes them back.

    Invariant: every page is free, idle (a cached prefix that no sequence holds), in limbo, or in the block table of a
    running sequence; only full pages of known content are in more than one.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        shares_prefixes: bool = False,
        num_host_pages: int = 0,
        states: StatePool | None = None,  # of layers with a state besides the pages; None: the model has none
    ) -> None:
        assert states is None or not num_host_pages, "pages without the layers' state are of no use on the host"
        self.states = states or StatePool(0, 0, page_size)
        self.is_whole = states is None  # a sequence can continue from pages alone
        self.pool = PagePool(num_pages, page_size, self._on_evict)
        self.limbo = Limbo(self.pool)
        self.index = PrefixIndex(page_size)
        self.host = HostPool(num_host_pages)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.shares_prefixes = shares_prefixes and (self.is_whole or self.states.num_snapshots > 0)
        self._moves = MovesDraft()
        # A step swaps in one direction only. A swap-in prevented by swap-outs gets the next step.
        self._is_kept_for_swap_in = False
        self._swap_in_is_wanted = False

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_available(self) -> int:
        """Pages available at once: free ones, idle ones, and those in limbo that no step touches."""
        return self.pool.num_available + self.limbo.num_reclaimable

    def has(self, num_pages: float) -> bool:
        """Whether this many pages are available at once. Limbo is searched only if the others do not suffice."""
        return num_pages <= self.pool.num_available or num_pages <= self.num_available

    def pages_for(self, num_tokens: int) -> int:
        return self.pool.pages_for(num_tokens)

    # A sequence enters, grows, and leaves.

    def find(self, sequence: Sequence) -> Match:
        """The cached part of a waiting sequence. Left to compute are at least one token, for its logits, and all tokens
        whose logits are needed.
        """
        if not self.shares_prefixes:
            return NO_MATCH
        if not sequence.host_table:
            match = self.index.match(sequence.tokens[: sequence.num_reusable_tokens], sequence.cache_salt)
            return self.states.usable(match)
        # It was swapped out with all its computed tokens: only pages that need no swap-in are useful.
        match = self.index.match(sequence.tokens[: sequence.num_computed_tokens], sequence.cache_salt)
        return Match(list(takewhile(lambda node: node.page, match.nodes)))

    def awaits_prompt_pages(self, sequence: Sequence) -> bool:
        """Whether it is still computing full pages of its prompt that others will be able to share."""
        num_known = sequence.tip.depth if sequence.tip else 0
        return self.shares_prefixes and num_known < sequence.num_prompt_tokens // self.pool.page_size

    def num_missing(self, sequence: Sequence) -> int:
        """Pages that a running sequence still needs for its present tokens."""
        return self.pool.pages_for(sequence.num_tokens) - len(sequence.block_table)

    def num_wanted(self, sequences: list[Sequence], match: Match) -> int:
        """Available pages needed by waiting sequences that enter together, for their present tokens."""
        first = sequences[0]
        if not first.host_table:
            return self.pool.pages_for(first.num_tokens) - self._num_in_use(node.page for node in match.nodes)
        num_grown = sum(
            max(self.pool.pages_for(s.num_tokens) - len(s.host_table), int(s.shares_tail)) for s in sequences
        )
        return self._num_swapped(sequences, match) + num_grown

    def may_enter(self, sequences: list[Sequence], match: Match) -> bool:
        """Whether ``enter`` is possible in this step."""
        if sequences[0].host_table:
            num_pages = self._num_swapped(sequences, match)
        else:
            num_pages = self.pool.pages_for(match.num_tokens(self.pool.page_size))
            num_pages -= self._num_in_use(node.page for node in match.nodes)
        if not self.has(num_pages):
            return False
        if self._moves.swap_out and (sequences[0].host_table or match.is_away):
            self._swap_in_is_wanted = True
            # Mark them as just used, so they are evicted last: without swap-outs, evicted prefixes are lost.
            on_device = [node.page for node in match.nodes if node.page]
            self.pool.share(on_device)
            self.pool.free(on_device)
            return False
        return True

    def enter(self, sequences: list[Sequence], match: Match) -> None:
        """Restore the pages of swapped-out ``sequences``, and give the first of them the pages of ``match``.

        Sequences that were swapped out together, and no others, return together.
        """
        sequence = sequences[0]
        if sequence.host_table or match.is_away:
            self._is_kept_for_swap_in = True
        # Take references first, so that none of these pages is evicted to make room for another.
        self.pool.share([node.page for node in match.nodes if node.page])
        for node in match.nodes:
            if not node.page:
                self._swap_in(node)
        sequence.block_table = [node.page for node in match.nodes]
        sequence.tip = match.nodes[-1] if match.nodes else None
        if sequence.host_table:
            for member in sequences:
                self._swap_in_rest(member)
        else:
            sequence.num_computed_tokens = len(match.nodes) * self.pool.page_size
            if match.tail is not None:
                self._copy_tail(sequence, match)
            self._count(sequence)
        self.states.enter(sequence, match)

    def extend(self, sequence: Sequence, num_tokens: int) -> int:
        """Allocate pages for the next ``num_tokens`` tokens, as far as available.

        A half-full last page is filled first. Returns how many of these tokens have a place now.
        """
        if sequence.shares_tail and not self._own_tail(sequence):
            return 0
        table = sequence.block_table
        end = sequence.num_computed_tokens + num_tokens
        num_missing = self.pool.pages_for(end) - len(table)
        if num_missing > 0:
            table += self._allocate(num_missing)
        return min(end, len(table) * self.pool.page_size) - sequence.num_computed_tokens

    def shrink(self, sequence: Sequence, num_pages: int) -> None:
        """Free all pages but the first ``num_pages``; none of the others holds computed tokens."""
        self.pool.free(sequence.block_table[num_pages:])
        del sequence.block_table[num_pages:]

    def fork(self, child: Sequence, parent: Sequence) -> None:
        """Give ``child`` the pages of ``parent`` instead of its own. Each will copy a half-full last page."""
        self.pool.share(parent.block_table)
        self.pool.free(child.block_table)
        child.block_table, child.tip = list(parent.block_table), parent.tip
        child.num_computed_tokens = parent.num_computed_tokens
        child.shares_tail = parent.shares_tail = parent.num_computed_tokens % self.pool.page_size > 0

    def publish(self, sequence: Sequence) -> bool:
        """Let other sequences share the pages that ``sequence`` has filled.

        If the content of such a page is already cached, ``sequence`` takes the cached page and frees its own. Returns
        whether its block table has changed.
        """
        size, table, node = self.pool.page_size, sequence.block_table, sequence.tip
        first = node.depth if node else 0
        last = sequence.num_computed_tokens // size
        if first == last or not self.shares_prefixes:
            return False
        has_changed = False
        for index in range(first, last):
            node = self.index.add(
                node, sequence.cache_salt, sequence.tokens[index * size : (index + 1) * size].tobytes()
            )
            if not node.page:
                self._learn(node, table[index])
            elif node.page != table[index]:
                self.pool.share([node.page])
                self.pool.free([table[index]])
                table[index] = node.page
                has_changed = True
        sequence.tip = node
        self.states.publish(sequence)
        return has_changed

    def give_up(self, sequence: Sequence) -> None:
        """Free the pages of a preempted sequence; shareable ones stay cached until evicted."""
        self.pool.free(sequence.block_table)
        sequence.block_table, sequence.tip, sequence.num_computed_tokens = [], None, 0
        sequence.shares_tail = False

    def swap_out(self, sequences: list[Sequence]) -> bool:
        """Move the computed pages of preempted sequences to the host; False, with nothing moved, if impossible now.

        A page that several of them hold is moved once. It is not moved at all if an earlier swapped-out sequence still
        has its content on the host.
        """
        tables = [s.block_table[: self.pool.pages_for(s.num_computed_tokens)] for s in sequences]
        entries = Counter(chain.from_iterable(tables))
        moved = [page for page in entries if self.host.twin(page) is None]
        if not all(tables) or not self._may_swap_out or not self._make_host_room(len(moved)):
            return False
        # NOTE: only beams of one search share a half-full page. They move together, so it is not written to while it
        # has a twin.
        host_pages = self.host.allocate(len(moved))
        for page, host_page in zip(moved, host_pages, strict=True):
            self._moves.swap(page, host_page)
            self.host.pair(page, host_page)
        for sequence, table in zip(sequences, tables, strict=True):
            sequence.host_table = self.host.share_twins(table)
        self.host.free(host_pages)
        self._disown(entries)
        for sequence in sequences:
            self.pool.free(sequence.block_table)
            sequence.block_table, sequence.tip = [], None
        return True

    def retire(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Move the pages of a finished sequence to limbo. Those computed by an unsound one leave the index."""
        self.host.free(sequence.host_table)
        sequence.host_table = []
        if not is_sound:
            # Sequences in limbo do not count as users of a page: they may have failed because of the same pages.
            in_limbo = Counter(chain.from_iterable(self.limbo.tables()))
            entries = Counter(sequence.block_table)
            self._disown(Counter({page: count + in_limbo[page] for page, count in entries.items()}))
        if sequence.block_table:
            self.limbo.put(sequence.key, sequence.block_table, sequence.last_step)
            sequence.block_table = []
        sequence.tip = None

    def release(self, key: Key) -> None:
        self.limbo.release(key)

    def complete(self, step: int) -> None:
        self.limbo.complete(step)

    def take_moves(self) -> Moves:
        """The page moves to do before the planned step; resets them for the next step."""
        moves = self._moves.finish()
        if moves:
            self._moves = MovesDraft()
        self._is_kept_for_swap_in, self._swap_in_is_wanted = self._swap_in_is_wanted, False
        return moves

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence] = ()) -> None:
        """Check the invariants of pool, index and host.

        Raises:
            PageLedgerError: names what is lost or miscounted.
        """
        running = list(running)
        self.pool.check([sequence.block_table for sequence in running], self.limbo.tables())
        self.index.check(self.pool.idle_pages())
        self.host.check([sequence.host_table for sequence in waiting], self.index.nodes())
        self.states.check(running, self.index.nodes())
        for sequence in running:
            node = sequence.tip
            while node is not None and node.depth:
                assert sequence.block_table[node.depth - 1] == node.page, f"{sequence.key} does not hold {node.page}"
                node = node.parent

    # Pages on their way between device and host.

    def _allocate(self, num_pages: int) -> list[int]:
        """Allocate this many pages, or as many as available."""
        self.limbo.reclaim(num_pages)
        pages = self.pool.allocate(min(num_pages, self.pool.num_available))
        self._moves.forget(pages)
        self.host.part(pages)
        return pages

    def _num_in_use(self, pages: Iterable[int]) -> int:
        """How many of these are in use anyway, and so not among the available ones."""
        held = self.pool.held(pages)
        if not held:
            return 0
        reclaimable = self.limbo.reclaimable()
        return len(held) - sum(map(reclaimable.__contains__, held)) if reclaimable else len(held)

    def _num_swapped(self, sequences: list[Sequence], match: Match) -> int:
        """Available pages needed for the host tables of ``sequences``, the first of which begins with ``match``."""
        away = {page for sequence in sequences for page in sequence.host_table}
        away.difference_update(sequences[0].host_table[: len(match.nodes)])
        twins = [twin for page in away if (twin := self.host.twin_on_device(page))]
        return len(away) + len(match.nodes) - self._num_in_use([*(node.page for node in match.nodes), *twins])

    @property
    def _may_swap_out(self) -> bool:
        return self.host.num_pages > 0 and not self._moves.swap_in and not self._is_kept_for_swap_in

    def _make_host_room(self, num_pages: int) -> bool:
        """Free this many host pages by dropping the least recently used prefixes; False if that is impossible."""
        if num_pages > self.host.num_available:
            return False
        while self.host.num_free < num_pages and (node := self.host.oldest_prefix):
            self._remove(node)
        return True

    def _on_evict(self, page: int) -> None:
        """The pool reclaims an idle page: move its content to the host if possible, otherwise forget it."""
        node = self.index.take(page)
        assert node is not None, f"page {page} is idle and has no content"
        if self._may_swap_out and self._make_host_room(1):
            self._moves.swap_out.append((page, self.host.put(node)))
        else:
            self._remove(node)

    def _swap_in(self, node: PageNode) -> None:
        (page,) = self._allocate(1)
        self._moves.swap_in[page] = self.host.take(node)
        self._learn(node, page)

    def _swap_in_rest(self, sequence: Sequence) -> None:
        """Restore the remaining pages of a swapped-out sequence, sharing those that are already back on the device."""
        host_table, sequence.host_table = sequence.host_table, []
        for page, host_page in zip(sequence.block_table, host_table, strict=False):
            self.host.pair(page, host_page)
        twins = {page: self.host.twin_on_device(page) for page in host_table[len(sequence.block_table) :]}
        table = {page: twin for page, twin in twins.items() if twin is not None and self.pool.refs(twin)}
        self.pool.share(table.values())
        away = [page for page in twins if page not in table]
        for host_page, page in zip(away, self._allocate(len(away)), strict=True):
            self._moves.swap_in[page] = host_page
            self.host.pair(page, host_page)
            table[host_page] = page
        sequence.block_table += [table[page] for page in twins]
        self.host.free(host_table)

    def _copy_tail(self, sequence: Sequence, match: Match) -> None:
        """Allocate a page and copy to it a cached one that begins with the same tokens; the rest is overwritten."""
        tail = match.tail
        assert tail is not None, f"{sequence.key} has no tail to copy"
        source, host_page = tail.page, tail.host_page
        (page,) = self._allocate(1)
        if source:
            self._moves.copy(source, page)
        else:
            assert host_page is not None, f"the tail for {sequence.key} is nowhere"
            self._moves.swap_in[page] = host_page
        sequence.block_table.append(page)
        sequence.num_computed_tokens += match.num_tail_tokens

    def _own_tail(self, sequence: Sequence) -> bool:
        """Copy the half-full last page of ``sequence`` if another sequence holds it too. False if no page is free."""
        page = sequence.block_table[-1]
        if self.pool.refs(page) > 1:
            own = self._allocate(1)
            if not own:
                return False
            self._moves.copy(page, own[0])
            sequence.block_table[-1] = own[0]
            self.pool.free([page])
        sequence.shares_tail = False
        return True

    def _count(self, sequence: Sequence) -> None:
        if self.shares_prefixes and not sequence.num_preemptions:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.num_queried_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += sequence.num_cached_tokens

    # The index of page contents.

    def _learn(self, node: PageNode, page: int) -> None:
        if node.host_page is not None:
            self.host.take(node)
        self.index.put(node, page)
        self.pool.keep(page)

    def _disown(self, entries: Counter[int]) -> None:
        """Remove the content of these pages from the index, unless a page has more holders than are counted here."""
        for page, count in entries.items():
            node = self.index.node_of(page)
            if node is not None and self.pool.refs(page) == count:
                self._remove(node)

    def _remove(self, node: PageNode) -> None:
        """Remove a node and all its descendants."""
        for gone in self.index.remove(node):
            if gone.page:
                self.pool.forget(gone.page)
            if gone.host_page is not None:
                self.host.take(gone)
            self.states.forget(gone)
