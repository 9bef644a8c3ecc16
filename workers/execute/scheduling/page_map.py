"""A map of page ownership, bounded in size, for observers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....protocol.arrays import Int32
from .scheduler import Scheduler
from .sequence import Sequence

MAX_CELLS = 2048
FREE, CACHED, LIMBO, SHARED, FIRST_OWNER = range(5)  # codes of a cell; the owner in slot s is FIRST_OWNER + s


class PageMap(NamedTuple):
    """The pool as cells of ``pages_per_cell`` pages, in the order of the page ids."""

    num_pages: int
    pages_per_cell: int
    runs: list[int]  # run-length encoding: code, number of cells with it, code, number of cells, ...
    held: list[list[int]]  # [slot, pages in its block table] of each sequence that holds any


def map_pages(scheduler: Scheduler, *, max_cells: int = MAX_CELLS) -> PageMap:
    """The pool as it is now. Visits every page: for observers, not for every step.

    A cell of several pages shows the highest code among them, so that held pages are not hidden by free ones.
    """
    cache, num_pages = scheduler.cache, scheduler.cache.num_pages
    codes = np.zeros(num_pages + 1, np.int32)
    num_holders = np.zeros(num_pages + 1, np.int32)
    codes[cache.pool.idle_pages()] = CACHED
    for pages in cache.limbo.tables():
        codes[pages] = LIMBO
    held = []
    for sequence in scheduler.running.values():
        table = _table(scheduler, sequence)
        if len(table):
            codes[table] = FIRST_OWNER + sequence.key[0]
            num_holders[table] += 1
            held.append([sequence.key[0], len(table)])
    codes[num_holders > 1] = SHARED
    pages_per_cell = -(-num_pages // max_cells)
    return PageMap(num_pages, pages_per_cell, _runs(_cells(codes[1:], pages_per_cell)), held)


def _table(scheduler: Scheduler, sequence: Sequence) -> Int32 | list[int]:
    """The pages of a sequence; for one in a row the existing array, as converting a list would be expensive."""
    if sequence.row is None:
        return sequence.block_table
    return scheduler.rows.block_tables[sequence.row, : len(sequence.block_table)]


def _cells(codes: Int32, pages_per_cell: int) -> Int32:
    """int32 [num_cells]; the last cell may have fewer pages than the others."""
    padded = np.zeros(-(-len(codes) // pages_per_cell) * pages_per_cell, np.int32)
    padded[: len(codes)] = codes
    cells: Int32 = padded.reshape(-1, pages_per_cell).max(axis=1)
    return cells


def _runs(cells: Int32) -> list[int]:
    starts = np.flatnonzero(np.diff(cells, prepend=-1))
    counts = np.diff(starts, append=len(cells))
    return [int(value) for value in np.stack([cells[starts], counts], axis=1).ravel()]
