"""Speculative decoding with a draft model: a smaller model of the same vocabulary guesses the target model's tokens.

The draft model has pages of its own, one for each of the target model's and with the same ids, so a sequence's block
table is valid for both. It reads a prompt only once the answer is being decoded, and in pieces, so that other sequences
are not held up. Each guess is launched before the one it follows is known here: a runner that computes in the
background takes its token from there.

A mistake costs only time, so whatever may be out of date is recomputed.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .....protocol.arrays import Int32, Int64
from ...scheduling.proposals import MAX_CHECKED_TOKENS, FindCosts, Proposer
from ...scheduling.sequence import Key, Sequence
from ...step import StepInputs
from ..step_runner import StepRunner, trash_prefill, with_longest_tables

logger = logging.getLogger(__name__)

FEW = 32  # up to so many unread tokens of a sequence were decoded since the last call; more are a prompt
_USUAL = 3  # unread tokens of a sequence with which the cost of a guess is measured


class Limits(NamedTuple):
    """How much a draft model does at once on a kind of device."""

    max_rows: int  # sequences in a step
    max_behind: int  # tokens of prompts that are read in a step: with more, other sequences would wait too long
    read_with_a_guess: int  # tokens of a prompt that are read in the time of one guess, at least
    max_chunks: int  # sequences in a step of more than ``max_short`` tokens
    max_short: int

    @property
    def max_step_tokens(self) -> int:
        return self.max_behind + self.max_rows * FEW

    def scratch_pages(self, page_size: int) -> int:
        """Return how many pages the guesses of one step may need beyond the sequences' own pages."""
        return self.max_rows * -(-MAX_CHECKED_TOKENS // page_size)


ON_CPU = Limits(MAX_CHECKED_TOKENS, max_behind=256, read_with_a_guess=16, max_chunks=MAX_CHECKED_TOKENS, max_short=0)


@dataclass(slots=True)
class _Known:
    """What the last call left of a sequence. Its pages have not been written since.

    Each full page has an identity: a hash of all tokens up to the end of the page.
    """

    sequence: Sequence
    identities: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)  # pages of the computed tokens
    num_computed: int = 0


@dataclass(frozen=True, slots=True)
class _Row:
    sequence: Sequence
    start: int  # of the tokens computed in the first run
    end: int
    num_wanted: int  # tokens to propose; 0 if the sequence is not read to its end yet

    @property
    def tokens(self) -> Int32:
        return self.sequence.tokens[self.start : self.end]


class DraftModel(Proposer):
    """Proposes a smaller model's tokens, sampled with the random numbers that the target model will use."""

    chance = 0.8  # more or less, of a smaller model of the same family

    def __init__(
        self,
        runner: StepRunner,
        *,
        num_pages: int,
        page_size: int,
        vocab_size: int,
        known_ids: int,
        limits: Limits = ON_CPU,
    ) -> None:
        """``runner`` has ``limits.scratch_pages`` more pages than ``num_pages``. Only ids below ``vocab_size`` are
        proposed; sequences with ids of ``known_ids`` or above cannot be read.
        """
        self.runner = runner
        self._limits = limits
        self._num_pages = num_pages
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._known_ids = known_ids
        self._filled: npt.NDArray[np.int64] = np.zeros(num_pages + 1, np.int64)  # identity by page; 0: none
        self._known: dict[Key, _Known] = {}
        self._proposals: dict[Key, list[int]] = {}
        self._is_sound = True

    def warm_up(self, progress: Callable[[int, int], None], *, is_first: bool) -> None:
        self.runner.warm_up()
        if is_first:
            self.runner.capture_graphs(progress)
        else:
            self.runner.capture_largest()

    def measure_costs(self, decode_s: Callable[[int], float]) -> None:
        """Measure steps of one sequence, of two and of the most, since kernels for one may differ from those for more;
        between the latter, costs are assumed to grow evenly.
        """
        most = self._limits.max_rows
        sizes = sorted({1, min(2, most), most})
        measured = [self._costs_of(size, decode_s(size)) for size in sizes]
        for size, costs in zip(sizes, measured, strict=True):
            text = "of %d sequences, a guess of the draft model takes %.2f of a step, the first one %.2f more"
            logger.info(text, size, costs.token, costs.start)
        each = np.arange(1, most + 1)
        tokens = np.interp(each, sizes, [costs.token for costs in measured]).tolist()
        starts = np.interp(each, sizes, [costs.start for costs in measured]).tolist()
        self.costs = tuple(map(FindCosts, tokens, starts))

    def _costs_of(self, num_sequences: int, decode_s: float) -> FindCosts:
        own_s = self.runner.decode_s(num_sequences)
        num_chunks = min(num_sequences, self._limits.max_chunks)
        first = trash_prefill(num_chunks * _USUAL, max_len=_USUAL)
        first_s = self.runner.best_seconds_of(with_longest_tables(first, 1))
        return FindCosts(own_s / decode_s, max(0.0, first_s - own_s) / decode_s)

    def prepare(self, seconds: float) -> bool:
        return self.runner.prepare(seconds)

    def show_progress(self, word: npt.NDArray[np.int64]) -> None:
        self.runner.show_progress(word)

    def begin(self, wanted: list[tuple[Sequence, int]]) -> None:
        self._proposals = {}
        if not wanted or not self._is_sound:
            return
        try:
            self._guess(wanted)
        except Exception:  # guesses are optional: requests go on without them
            self._is_sound = False
            logger.exception("the draft model failed; it proposes no tokens until the next restart")

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int] | None:
        if not self._is_sound:
            return []
        proposals = self._proposals.get(sequence.key)
        return None if proposals is None else proposals[:max_tokens]

    def _guess(self, wanted: list[tuple[Sequence, int]]) -> None:
        rows = self._rows(wanted)
        known = {row.sequence.key: self._known[row.sequence.key] for row in rows}
        self._known = known  # for other sequences it is determined anew
        if not rows:
            return
        tables = self._tables(rows)
        for row in rows:
            self._note(row)
        asked = [index for index, row in enumerate(rows) if row.num_wanted]
        said: dict[Key, list[int]] = {rows[index].sequence.key: [] for index in asked}
        self._launch(rows, tables, asked)
        for depth in count(1):
            following = [index for index in asked if rows[index].num_wanted > depth]
            if following:
                places = np.searchsorted(asked, following).astype(np.int32)
                self._launch_next([rows[index] for index in following], tables[following], places, depth - 1)
            for index, token in zip(asked, self.runner.collect().token_ids.tolist(), strict=True):
                said[rows[index].sequence.key].append(token)
            if not following:
                break
            asked = following
        for key, tokens in said.items():
            self._proposals[key] = list(takewhile(lambda token: token < self._vocab_size, tokens))

    def _rows(self, wanted: list[tuple[Sequence, int]]) -> list[_Row]:
        """Choose what the first run computes: the unread tokens of each sequence, up to the limits of one step."""
        limits = self._limits
        rows, num_left, total = list[_Row](), limits.max_behind, 0
        behind = [(each, count, self._num_unread(each)) for each, count in wanted[: limits.max_rows]]
        if len(behind) > limits.max_chunks:  # not all may have room: then the others come first in the next step
            behind.sort(key=lambda found: -found[2])
        for sequence, num_wanted, num_unread in behind:
            start = sequence.num_tokens - num_unread
            if int(sequence.tokens[start : sequence.num_tokens].max()) >= self._known_ids:
                self._proposals[sequence.key] = []
                continue
            num_read = num_unread
            if num_unread > FEW:
                if not self._is_worth_reading(num_unread, len(sequence.tokens) - sequence.num_tokens):
                    self._proposals[sequence.key] = []
                    continue
                num_read = min(num_unread, num_left)
            if not num_read or (len(rows) >= limits.max_chunks and total + num_read > limits.max_short):
                continue
            num_left -= num_read if num_unread > FEW else 0
            total += num_read
            rows.append(_Row(sequence, start, start + num_read, num_wanted if num_read == num_unread else 0))
        return rows

    def _num_unread(self, sequence: Sequence) -> int:
        """At least one: the last token is computed again if need be, as it yields the logits of the first guess."""
        return sequence.num_tokens - min(self._num_known(sequence), sequence.num_tokens - 1)

    def _is_worth_reading(self, num_tokens: int, num_following: int) -> bool:
        """Whether enough tokens may still follow for reading to pay off, if guesses save half a step for each."""
        return num_tokens * self.costs[0].token / self._limits.read_with_a_guess <= num_following / 2

    def _num_known(self, sequence: Sequence) -> int:
        """Return the number of tokens whose keys and values are in the sequence's current pages."""
        known, table, size = self._known.get(sequence.key), sequence.block_table, self._page_size
        if known is None or known.sequence is not sequence:
            known = self._known[sequence.key] = _Known(sequence)
        for index in range(len(known.identities), sequence.num_tokens // size):
            before = known.identities[-1] if known.identities else sequence.cache_salt
            tokens = sequence.tokens[index * size : (index + 1) * size]
            known.identities.append(hash((before, tokens.tobytes())))
        if not known.table or table[: len(known.table)] != known.table:
            known.num_computed = size * self._num_filled(known.identities, table)
        return known.num_computed

    def _num_filled(self, identities: list[int], table: list[int]) -> int:
        """Count the leading pages that hold what they should, whichever sequence computed it."""
        is_filled = self._filled[table[: len(identities)]] == identities[: len(table)]
        return len(is_filled) if is_filled.all() else int(is_filled.argmin())

    def _note(self, row: _Row) -> None:
        """Record what the pages will hold once the row is computed."""
        known, size = self._known[row.sequence.key], self._page_size
        known.num_computed = row.end
        known.table = row.sequence.block_table[: -(-row.end // size)]
        first, num_full = row.start // size, row.end // size
        self._filled[known.table[first:]] = 0
        self._filled[known.table[first:num_full]] = known.identities[first:num_full]

    def _tables(self, rows: Seq[_Row]) -> Int32:
        """Build block tables [rows, pages]: each sequence's pages up to its last token, then scratch pages."""
        size = self._page_size
        num_scratch = -(-MAX_CHECKED_TOKENS // size)
        widths = [-(-(row.end + max(0, row.num_wanted - 1)) // size) for row in rows]  # guesses included
        tables = np.zeros((len(rows), max(widths)), np.int32)
        for index, (row, width) in enumerate(zip(rows, widths, strict=True)):
            own = row.sequence.block_table[: -(-row.end // size)]
            first = self._num_pages + 1 + index * num_scratch
            tables[index, :width] = [*own, *range(first, first + width - len(own))]
        return tables

    def _launch(self, rows: Seq[_Row], tables: Int32, asked: list[int]) -> None:
        """Compute the unread tokens of each row, and sample after the last one of each row in ``asked``."""
        lengths = np.array([row.end - row.start for row in rows], np.int32)
        owners = np.repeat(np.arange(len(rows)), lengths)
        ends = np.cumsum(lengths, dtype=np.int32)
        starts = np.array([row.start for row in rows], np.int32)
        positions = np.arange(ends[-1], dtype=np.int32) + (starts - ends + lengths)[owners]
        self.runner.launch(StepInputs(
            token_ids=np.concatenate([row.tokens for row in rows]),
            positions=positions,
            slot_mapping=self._slots(tables, owners, positions),
            query_starts=np.concatenate([np.zeros(1, np.int32), ends]),
            context_lens=starts + lengths,
            block_tables=tables,
            num_decodes=len(rows) if len(owners) == len(rows) else 0,
            sample_rows=ends[asked] - np.int32(1),
            sampled=[rows[index].sequence for index in asked],
        ))  # fmt: skip

    def _launch_next(self, rows: Seq[_Row], tables: Int32, places: Int32, num_guessed: int) -> None:
        """Compute the latest guess of each row, which is in this place of the step in flight, and sample after it."""
        indices = np.arange(len(rows) + 1, dtype=np.int32)
        positions = np.array([row.end + num_guessed for row in rows], np.int32)
        self.runner.launch(StepInputs(
            token_ids=np.zeros(len(rows), np.int32),
            positions=positions,
            slot_mapping=self._slots(tables, indices[:-1], positions),
            query_starts=indices,
            context_lens=positions + np.int32(1),
            block_tables=tables,
            num_decodes=len(rows),
            sample_rows=indices[:-1],
            sampled=[row.sequence for row in rows],
            carried=places,
        ))  # fmt: skip

    def _slots(self, tables: Int32, owners: npt.NDArray[np.integer], positions: Int32) -> Int64:
        pages = positions // self._page_size
        slots: Int64 = tables[owners, pages] * np.int64(self._page_size) + (positions - pages * self._page_size)
        return slots
