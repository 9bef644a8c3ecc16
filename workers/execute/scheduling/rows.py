"""The rows of a decode batch: which sequence has which, and the block tables in the layout of the attention kernel."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left

import numpy as np

from ....protocol.arrays import Int32
from .sequence import Sequence


class Rows:
    """Rows 0..num_rows-1, the lowest free one first, so that a batch stays dense and its graphs small.

    Invariant: ``block_tables[row]`` is the block table of the sequence in that row, padded with page 0. It is written
    when a page is added, not in every step, which keeps steps with many long sequences cheap.
    """

    def __init__(self, num_rows: int, max_pages: int) -> None:
        self.block_tables: Int32 = np.zeros((num_rows, max_pages), np.int32)
        self._free = list(range(num_rows))  # a heap
        self._seated: dict[int, Sequence] = {}
        self._next_row = 0  # whose turn is next
        self.version = 0  # changes whenever a sequence takes or leaves a row

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __len__(self) -> int:
        return len(self._seated)

    @property
    def seated(self) -> list[Sequence]:
        """The sequences in rows, the longest-seated first."""
        return list(self._seated.values())

    def take_turns(self, max_rows: int, *, max_reads: float = math.inf, at_least_one: bool = True) -> list[Sequence]:
        """Up to ``max_rows`` of the seated sequences, which together read up to ``max_reads`` tokens, in row order.

        If not all can go they take turns: the first one left out comes first the next time. With ``at_least_one`` that
        one goes however much it reads, so that every sequence progresses.
        """
        rows = sorted(self._seated)
        if len(rows) <= max_rows and max_reads == math.inf:
            return [self._seated[row] for row in rows]
        first = bisect_left(rows, self._next_row)
        turn: list[int] = []
        left_out: list[int] = []
        for row in rows[first:] + rows[:first]:
            reads = self._seated[row].num_tokens
            is_exempt = at_least_one and not turn
            if len(turn) < max_rows and (reads <= max_reads or is_exempt):
                turn.append(row)
                max_reads -= reads
            else:
                left_out.append(row)
        if left_out:
            self._next_row = left_out[0]
        return [self._seated[row] for row in sorted(turn)]

    def seat(self, sequence: Sequence) -> None:
        """Give ``sequence`` the lowest free row."""
        sequence.row = heapq.heappop(self._free)
        self._seated[sequence.row] = sequence
        self.version += 1
        self.write_pages(sequence, 0)

    def leave(self, sequence: Sequence) -> None:
        """Free the row of ``sequence``, which must still have its block table."""
        row = sequence.row
        assert row is not None, f"{sequence.key} has no row"
        assert self._seated[row] is sequence, f"row {row} belongs to {self._seated[row].key}, not to {sequence.key}"
        self.block_tables[row, : len(sequence.block_table)] = 0
        del self._seated[row]
        self.version += 1
        heapq.heappush(self._free, row)
        sequence.row = None

    def write_pages(self, sequence: Sequence, first: int) -> None:
        """Copy the pages of ``sequence`` from index ``first`` on into its row."""
        pages = sequence.block_table[first:]
        self.block_tables[sequence.row, first : first + len(pages)] = pages

    def drop_pages(self, sequence: Sequence, first: int) -> None:
        """Clear the pages of ``sequence`` from index ``first`` on in its row; it must still have them."""
        self.block_tables[sequence.row, first : len(sequence.block_table)] = 0

    def check(self) -> None:
        for row, sequence in self._seated.items():
            table = sequence.block_table
            assert sequence.row == row, f"{sequence.key} is in row {row}, but has {sequence.row}"
            assert self.block_tables[row, : len(table)].tolist() == table, f"row {row} has stale pages"
        num_entries = np.count_nonzero(self.block_tables)
        num_pages = sum(len(sequence.block_table) for sequence in self._seated.values())
        assert num_entries == num_pages, f"{num_entries} pages in the rows, {num_pages} in their sequences"
