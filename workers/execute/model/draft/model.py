"""Speculative decoding with a draft model: a smaller model of the same vocabulary guesses the target model's tokens.

The draft model has pages of its own, one for each of the target model's and with the same ids, so a sequence's block
table is valid for both. It reads a prompt only once the answer is being decoded, and in pieces, so that other sequences
are not held up.

A mistake costs only time, so whatever may be out of date is recomputed.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import compress, count

import numpy as np
import numpy.typing as npt

from .....protocol.arrays import Int32
from ...scheduling.proposals import MAX_CHECKED_TOKENS, Proposer
from ...scheduling.sequence import Key, Sequence
from ...step import StepInputs
from ..step_runner import StepRunner, trash_decodes

logger = logging.getLogger(__name__)

MAX_BEHIND = 256  # unread tokens that are read in one step, at most: with more, other sequences would wait too long
_FEW = 32  # unread tokens of a sequence that do not count towards MAX_BEHIND: those decoded since the last call
_READ_WITH_A_GUESS = 16  # tokens of a prompt that are read in the time of one guess, at least
MAX_STEP_TOKENS = MAX_BEHIND + MAX_CHECKED_TOKENS * _FEW
_TRIALS = 3


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

    def __init__(self, runner: StepRunner, *, num_pages: int, page_size: int, vocab_size: int, known_ids: int) -> None:
        """``runner`` has ``scratch_pages`` more pages than ``num_pages``. Only ids below ``vocab_size`` are proposed;
        sequences with ids of ``known_ids`` or above cannot be read.
        """
        self._runner = runner
        self._num_pages = num_pages
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._known_ids = known_ids
        self._filled: npt.NDArray[np.int64] = np.zeros(num_pages + 1, np.int64)  # identity by page; 0: none
        self._known: dict[Key, _Known] = {}
        self._proposals: dict[Key, list[int]] = {}
        self._is_sound = True

    @staticmethod
    def scratch_pages(page_size: int) -> int:
        """Return how many pages the guesses of one step may need beyond the sequences' own pages."""
        return MAX_CHECKED_TOKENS * -(-MAX_CHECKED_TOKENS // page_size)

    def measure(self, other: StepRunner) -> None:
        """Measure the cost of a guess relative to a step of the target model."""
        self._runner.warm_up()
        decode = trash_decodes(1)
        own_s = min(self._runner.seconds_of(decode) for _ in range(_TRIALS))
        self.cost = own_s / min(other.seconds_of(decode) for _ in range(_TRIALS))
        logger.info("a guess of the draft model takes %.2f of a step", self.cost)

    def prepare(self, seconds: float) -> bool:
        return self._runner.prepare(seconds)

    def show_progress(self, word: npt.NDArray[np.int64]) -> None:
        self._runner.show_progress(word)

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
        tokens = self._run(rows, tables, [row.tokens for row in rows], [row.start for row in rows], asked)
        for depth in count():
            going_on = [self._take(rows[index], token) for index, token in zip(asked, tokens, strict=True)]
            asked = list(compress(asked, going_on))
            if not asked:
                return
            chosen = [rows[index] for index in asked]
            said = [np.array([token], np.int32) for token in compress(tokens, going_on)]
            tokens = self._run(chosen, tables[asked], said, [row.end + depth for row in chosen], range(len(chosen)))

    def _rows(self, wanted: list[tuple[Sequence, int]]) -> list[_Row]:
        """Choose what the first run computes: the unread tokens of each sequence, up to the limit of one step."""
        rows, num_left = [], MAX_BEHIND
        for sequence, num_wanted in wanted[:MAX_CHECKED_TOKENS]:
            start, end = min(self._num_known(sequence), sequence.num_tokens - 1), sequence.num_tokens
            if int(sequence.tokens[start:end].max()) >= self._known_ids:
                self._proposals[sequence.key] = []
                continue
            if end - start > _FEW:
                if not self._is_worth_reading(end - start, len(sequence.tokens) - sequence.num_tokens):
                    self._proposals[sequence.key] = []
                    continue
                end = min(end, start + num_left)
                num_left -= end - start
            if end > start:
                rows.append(_Row(sequence, start, end, num_wanted if end == sequence.num_tokens else 0))
        return rows

    def _is_worth_reading(self, num_tokens: int, num_following: int) -> bool:
        """Whether enough tokens may still follow for reading to pay off, if guesses save half a step for each."""
        return num_tokens * self.cost / _READ_WITH_A_GUESS <= num_following / 2

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
        widths = [-(-row.end // size) for row in rows]
        tables = np.zeros((len(rows), max(widths) + num_scratch), np.int32)
        for index, (row, width) in enumerate(zip(rows, widths, strict=True)):
            tables[index, :width] = row.sequence.block_table[:width]
            first = self._num_pages + 1 + index * num_scratch
            tables[index, width : width + num_scratch] = range(first, first + num_scratch)
        return tables

    def _run(
        self, rows: Seq[_Row], tables: Int32, tokens: list[Int32], starts: list[int], asked: Seq[int]
    ) -> list[int]:
        """Compute these tokens of each row, [rows]; returns the token that follows the last one of each row in
        ``asked``.
        """
        lengths = np.array([len(ids) for ids in tokens], np.int32)
        owners = np.repeat(np.arange(len(rows)), lengths)
        ends = np.cumsum(lengths, dtype=np.int32)
        firsts = np.array(starts, np.int32)
        positions = np.arange(ends[-1], dtype=np.int32) + (firsts - ends + lengths)[owners]
        pages = positions // self._page_size
        slots = tables[owners, pages] * np.int64(self._page_size) + (positions - pages * self._page_size)
        self._runner.launch(StepInputs(
            token_ids=np.concatenate(tokens),
            positions=positions,
            slot_mapping=slots,
            query_starts=np.concatenate([np.zeros(1, np.int32), ends]),
            context_lens=firsts + lengths,
            block_tables=tables,
            num_decodes=0,
            sample_rows=ends[list(asked)] - np.int32(1),
            sampled=[rows[index].sequence for index in asked],
        ))  # fmt: skip
        said: list[int] = self._runner.collect().token_ids.tolist()
        return said

    def _take(self, row: _Row, token_id: int) -> bool:
        """Add a proposal to the row's sequence; returns whether another is wanted."""
        proposals = self._proposals.setdefault(row.sequence.key, [])
        if token_id >= self._vocab_size:
            return False
        proposals.append(token_id)
        return len(proposals) < row.num_wanted and token_id < self._known_ids
