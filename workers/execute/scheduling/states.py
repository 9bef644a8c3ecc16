"""Rows for the state that a model's recurrent layers keep per sequence: one fixed-size state instead of pages.

A state covers all tokens up to some position and cannot be divided. A prefix can therefore be shared only if the state
at its end was kept: a *snapshot*, which belongs to the page whose last token is the last that the state has seen. Steps
read one row and write another, so a snapshot needs no copy: its row is kept, and the sequence continues in other rows.

Sources: Pan et al. 2024 (Marconi: prefix caching for hybrid models), Kwon et al. 2023 (copy on write).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .prefix import Match, PageNode
from .sequence import Key, Sequence

if TYPE_CHECKING:
    from .plan import Chunk

NO_ROW = 0  # the trash row: padding writes to it, and no sequence gets it


class Segment(NamedTuple):
    """Consecutive tokens of one sequence, between two states."""

    read: int  # row of the state before them; ignored if start is 0
    write: int  # row of the state after them
    start: int  # position of the first token
    num_tokens: int


def num_state_rows(num_running: int, num_snapshots: int) -> int:
    """Each running sequence has a row to read and one to write; the others are for snapshots."""
    return 2 * num_running + num_snapshots


@dataclass(slots=True)
class StateRows:
    """The rows of one running sequence."""

    next: int  # the next step writes here
    current: int = NO_ROW  # state after all computed tokens; none before the first step
    wanted: set[int] = field(default_factory=set)  # token counts at which a snapshot is worth keeping
    marks: list[tuple[int, int]] = field(default_factory=list)  # (token count, row) of snapshots in the planned step
    latest: PageNode | None = None  # of its latest snapshot

    def segments(self, start: int, num_tokens: int) -> Iterator[Segment]:
        """The segments of a chunk, divided where snapshots are taken."""
        read, end = self.current, start + num_tokens
        for border, row in (*self.marks, (end, self.next)):
            yield Segment(read, row, start, border - start)
            read, start = row, border


class StatePool:
    """Rows 1..num_rows.

    Invariant: a row is free, or has as many references as running sequences and page nodes hold it. When rows run out,
    the least recently used snapshot is evicted; there are enough rows that a running sequence always gets its own.
    """

    def __init__(self, num_running: int, num_snapshots: int, page_size: int) -> None:
        """``num_running`` 0: the model keeps no states."""
        self.num_rows = num_state_rows(num_running, num_snapshots) if num_running else 0
        self.num_snapshots = num_snapshots
        self._page_size = page_size
        self._free = list(range(self.num_rows, 0, -1))  # a stack
        self._refs = [0] * (self.num_rows + 1)
        self._kept: OrderedDict[int, PageNode] = OrderedDict()  # row -> node; the first is evicted first
        self._num_marked = 0  # rows reserved for snapshots of the planned step

    def usable(self, match: Match) -> Match:
        """The part of ``match`` that a sequence can continue from."""
        if not self.num_rows:
            return match
        num_nodes = len(match.nodes)
        while num_nodes and not match.nodes[num_nodes - 1].state_row:
            num_nodes -= 1
        return Match(match.nodes[:num_nodes], num_known_pages=len(match.nodes))

    def enter(self, sequence: Sequence, match: Match) -> None:
        """Start ``sequence`` from the snapshot at the end of ``match``.

        It will take snapshots at the last page border of its prompt, and where the pages end that it has in common with
        others.
        """
        if not self.num_rows:
            return
        current = match.nodes[-1].state_row if match.nodes else NO_ROW
        if current:
            self._refs[current] += 1
            self._kept.move_to_end(current)
        sequence.state_rows = StateRows(self._take(), current)
        if self.num_snapshots:
            last_page = (sequence.num_prompt_tokens - 1) // self._page_size
            sequence.state_rows.wanted |= {self._page_size * page for page in (match.num_known_pages, last_page)}

    def mark(self, chunks: Iterable[Chunk], running: Mapping[Key, Sequence]) -> None:
        """Reserve rows for the snapshots inside planned chunks: at their last page border, and where one is wanted.

        A snapshot at the very end of a chunk needs no row of its own. Chunks that must be exactly repeatable have no
        snapshots inside: dividing them may change how they round.
        """
        if not self.num_snapshots:
            return
        size = self._page_size
        for key, start, num_tokens, *_ in chunks:
            sequence, end = running[key], start + num_tokens
            if (rows := sequence.state_rows) is None or sequence.replays:
                continue
            for border in sorted({end // size * size, *rows.wanted}):
                if start < border < end and self._num_marked < self.num_snapshots:
                    rows.marks.append((border, self._take()))
                    self._num_marked += 1

    def advance(self, sequence: Sequence) -> None:
        """The planned step of ``sequence`` is computed."""
        if (rows := sequence.state_rows) is None:
            return
        before, rows.current = rows.current, rows.next
        if before and self._refs[before] == 1:
            rows.next = before
        else:
            self._drop(before)
            rows.next = self._take()

    def fork(self, child: Sequence, parent: Sequence) -> None:
        """Let ``child`` continue from the state of ``parent`` instead of its own."""
        if parent.state_rows is None:
            return
        self._refs[parent.state_rows.current] += 1
        if child.state_rows is None:
            child.state_rows = StateRows(self._take())
        self._drop(child.state_rows.current)
        child.state_rows.current = parent.state_rows.current

    def publish(self, sequence: Sequence) -> None:
        """Attach the snapshots of the last step of ``sequence`` to its page nodes, so that others can start there."""
        rows, node = sequence.state_rows, sequence.tip
        if rows is None or node is None:
            return
        self._num_marked -= len(rows.marks)
        marks, rows.marks = rows.marks, []
        if sequence.num_computed_tokens == node.depth * self._page_size:
            self._refs[rows.current] += 1
            marks.append((sequence.num_computed_tokens, rows.current))
        for border, row in marks:
            at: PageNode = node
            while at.depth * self._page_size > border and at.parent is not None:
                at = at.parent
            self._keep(at, row, rows)

    def leave(self, sequence: Sequence) -> None:
        """``sequence`` was preempted or has ended."""
        if (rows := sequence.state_rows) is None:
            return
        for row in (rows.current, rows.next, *(row for _, row in rows.marks)):
            self._drop(row)
        self._num_marked -= len(rows.marks)
        sequence.state_rows = None

    def forget(self, node: PageNode) -> None:
        """Drop the snapshot of ``node``, which leaves the index."""
        if node.state_row:
            del self._kept[node.state_row]
            self._drop(node.state_row)
            node.state_row = NO_ROW

    def check(self, running: Iterable[Sequence], nodes: Iterable[PageNode]) -> None:
        """Check the invariant.

        Raises:
            AssertionError: a row is lost or miscounted.
        """
        held: Counter[int] = Counter()
        num_marked = 0
        for sequence in running:
            assert (sequence.state_rows is None) == (self.num_rows == 0), f"{sequence.key}: {sequence.state_rows}"
            if (rows := sequence.state_rows) is not None:
                marked = [row for _, row in rows.marks]
                num_marked += len(marked)
                held.update([rows.next, *marked, *([rows.current] if rows.current else [])])
                assert bool(rows.current) == (sequence.num_computed_tokens > 0), f"{sequence.key}: {rows}"
        kept = {node.state_row: node for node in nodes if node.state_row}
        assert kept == dict(self._kept), f"snapshots are {sorted(self._kept)}, nodes have {sorted(kept)}"
        held.update(kept.keys())
        assert num_marked == self._num_marked, f"{num_marked} rows are for snapshots to come, not {self._num_marked}"
        for row in range(1, self.num_rows + 1):
            num_free = self._free.count(row)
            assert self._refs[row] == held[row], f"row {row} of states: {self._refs[row]} references, {held[row]} hold"
            assert num_free == (not held[row]), f"row {row} of states is {num_free} times free, {held[row]} hold it"

    def _keep(self, node: PageNode, row: int, rows: StateRows) -> None:
        """Make ``row``, with one reference to it, the snapshot of ``node``. The previous snapshot of the same sequence
        becomes the first to be evicted, unless it was wanted.
        """
        if node.state_row:
            self._drop(row)
            self._kept.move_to_end(node.state_row)
        else:
            node.state_row = row
            self._kept[row] = node
        before, rows.latest = rows.latest, node
        is_wanted = before is not None and before.depth * self._page_size in rows.wanted
        if before is not None and before is not node and before.state_row and not is_wanted:
            self._kept.move_to_end(before.state_row, last=False)

    def _take(self) -> int:
        if not self._free:
            self.forget(next(node for row, node in self._kept.items() if self._refs[row] == 1))
        row = self._free.pop()
        self._refs[row] = 1
        return row

    def _drop(self, row: int) -> None:
        if row:
            self._refs[row] -= 1
            if not self._refs[row]:
                self._free.append(row)
