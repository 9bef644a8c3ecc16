"""Who holds which page of the KV cache: sequences that run, and limbo for those that finished."""

from __future__ import annotations

from collections.abc import Iterable

from .limbo import Limbo
from .pages import PagePool
from .sequence import Key, Sequence


class PageCache:
    """Gives pages to sequences and takes them back.

    Invariant: every page is free, in the block table of a running sequence, or in limbo.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.limbo = Limbo(self.pool)

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be had at once: the free ones and those in limbo that no step touches."""
        return self.pool.num_free + self.limbo.num_reclaimable

    def pages_for(self, num_tokens: int) -> int:
        return self.pool.pages_for(num_tokens)

    def num_missing(self, sequence: Sequence) -> int:
        """Pages that ``sequence`` still needs for the tokens it has."""
        return self.pool.pages_for(sequence.num_tokens) - len(sequence.block_table)

    def extend(self, sequence: Sequence, num_tokens: int) -> int:
        """Gives pages for the next ``num_tokens`` tokens, as far as there are any.

        Goes on in the half-full page. Returns how many of these tokens have a place now.
        """
        table = sequence.block_table
        end = sequence.num_computed_tokens + num_tokens
        num_missing = self.pool.pages_for(end) - len(table)
        if num_missing > 0:
            self.limbo.reclaim(num_missing)
            table += self.pool.allocate(min(num_missing, self.pool.num_free))
        return min(end, len(table) * self.pool.page_size) - sequence.num_computed_tokens

    def give_up(self, sequence: Sequence) -> None:
        """Frees the pages of a preempted sequence; what was computed in them is lost."""
        self.pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def retire(self, sequence: Sequence) -> None:
        """Moves the pages of a finished sequence to limbo."""
        if sequence.block_table:
            self.limbo.put(sequence.key, sequence.block_table, sequence.last_step)
            sequence.block_table = []

    def release(self, key: Key) -> None:
        self.limbo.release(key)

    def complete(self, step: int) -> None:
        self.limbo.complete(step)

    def check(self, running: Iterable[Sequence]) -> None:
        """Proves the invariant; see ``PagePool.check``."""
        self.pool.check([sequence.block_table for sequence in running], self.limbo.tables())
