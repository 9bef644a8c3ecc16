"""The KV cache as sequences use it: they find what is cached, enter, grow, leave, and share what they have computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, takewhile

from .moves import Moves
from .page_records import PageRecords
from .page_store import PageStore
from .prefix import NO_MATCH, Match, root_key
from .sequence import Key, Sequence
from .states import StatePool


class PageCache:
    """Gives pages to sequences and takes them back.

    Invariant: that of ``PageStore``; and only full pages of known content are in several block tables, except for the
    half-full last page of forked sequences, which copy it before they grow.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        shares_prefixes: bool = False,
        num_host_pages: int = 0,
        states: StatePool | None = None,  # of layers with a state besides the pages; None: the model has none
        records: PageRecords | None = None,  # of what pages hold, also from before this process; None: none are kept
    ) -> None:
        assert states is None or not num_host_pages, "pages without the layers' state are of no use on the host"
        self.states = states or StatePool(0, 0, page_size)
        self.is_whole = states is None  # a sequence can continue from pages alone
        self._store = store = PageStore(num_pages, page_size, num_host_pages, self.states, records)
        self.pool, self.limbo, self.index, self.host = store.pool, store.limbo, store.index, store.host
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.shares_prefixes = shares_prefixes and (self.is_whole or self.states.num_snapshots > 0)

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_available(self) -> int:
        """See ``PageStore.num_available``."""
        return self._store.num_available

    def has(self, num_pages: float) -> bool:
        """See ``PageStore.has``."""
        return self._store.has(num_pages)

    def pages_for(self, num_tokens: int) -> int:
        return self.pool.pages_for(num_tokens)

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
            return self.pool.pages_for(first.num_tokens) - self._store.num_in_use(node.page for node in match.nodes)
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
            num_pages -= self._store.num_in_use(node.page for node in match.nodes)
        if not self.has(num_pages):
            return False
        if (sequences[0].host_table or match.is_away) and not self._store.request_swap_in():
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
            self._store.keep_for_swap_in()
        # Take references first, so that none of these pages is evicted to make room for another.
        self.pool.share([node.page for node in match.nodes if node.page])
        for node in match.nodes:
            if not node.page:
                self._store.swap_in(node)
        sequence.block_table = [node.page for node in match.nodes]
        sequence.tip = match.nodes[-1] if match.nodes else None
        if sequence.host_table:
            for member in sequences:
                self._store.swap_in_rest(member.block_table, member.host_table)
                member.host_table = []
        else:
            sequence.num_computed_tokens = len(match.nodes) * self.pool.page_size
            if match.tail is not None:
                sequence.block_table.append(self._store.allocate_copy(match.tail))
                sequence.num_computed_tokens += match.num_tail_tokens
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
            table += self._store.allocate(num_missing)
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
        size, table = self.pool.page_size, sequence.block_table
        first, last = sequence.tip.depth if sequence.tip else 0, sequence.num_computed_tokens // size
        if first == last or not self.shares_prefixes:
            return False
        has_changed, node = False, sequence.tip or self.index.root(root_key(sequence.cache_salt))
        for index in range(first, last):
            node = self.index.add(node, sequence.tokens[index * size : (index + 1) * size].tobytes())
            if not node.page:
                self._store.learn(node, table[index])
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
        """Move the computed pages of preempted sequences to the host; False, with nothing moved, if impossible now."""
        tables = [s.block_table[: self.pool.pages_for(s.num_computed_tokens)] for s in sequences]
        host_tables = self._store.swap_out(tables) if all(tables) else None
        if host_tables is None:
            return False
        self._store.disown(Counter(chain.from_iterable(tables)))
        for sequence, host_table in zip(sequences, host_tables, strict=True):
            self.pool.free(sequence.block_table)
            sequence.block_table, sequence.host_table, sequence.tip = [], host_table, None
        return True

    def retire(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Move the pages of a finished sequence to limbo. Those computed by an unsound one leave the index."""
        self.host.free(sequence.host_table)
        sequence.host_table = []
        if not is_sound:
            # Sequences in limbo do not count as users of a page: they may have failed because of the same pages.
            in_limbo = Counter(chain.from_iterable(self.limbo.tables()))
            entries = Counter(sequence.block_table)
            self._store.disown(Counter({page: count + in_limbo[page] for page, count in entries.items()}))
        if sequence.block_table:
            self.limbo.put(sequence.key, sequence.block_table, sequence.last_step)
            sequence.block_table = []
        sequence.tip = None

    def release(self, key: Key) -> None:
        self.limbo.release(key)

    def complete(self, step: int) -> None:
        self.limbo.complete(step)

    def take_moves(self) -> Moves:
        """See ``PageStore.take_moves``."""
        return self._store.take_moves()

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

    def _num_swapped(self, sequences: list[Sequence], match: Match) -> int:
        """Available pages needed for the host tables of ``sequences``, the first of which begins with ``match``."""
        away = {page for sequence in sequences for page in sequence.host_table}
        away.difference_update(sequences[0].host_table[: len(match.nodes)])
        twins = [twin for page in away if (twin := self.host.twin_on_device(page))]
        return len(away) + len(match.nodes) - self._store.num_in_use([*(node.page for node in match.nodes), *twins])

    def _own_tail(self, sequence: Sequence) -> bool:
        """Copy the half-full last page of ``sequence`` if another sequence holds it too. False if no page is free."""
        page = sequence.block_table[-1]
        if self.pool.refs(page) > 1:
            own = self._store.allocate(1)
            if not own:
                return False
            self._store.copy(page, own[0])
            sequence.block_table[-1] = own[0]
            self.pool.free([page])
        sequence.shares_tail = False
        return True

    def _count(self, sequence: Sequence) -> None:
        if self.shares_prefixes and not sequence.num_preemptions:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.num_queried_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += sequence.num_cached_tokens
