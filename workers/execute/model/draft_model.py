"""A smaller model of the same tokens that guesses what a greater one will say.

It has pages of its own, one for each of the greater one's, and of the same numbers: what a sequence holds there, it
holds here. It reads a prompt once its answer is decoded, and no faster than others can bear.

What it gets wrong costs time and nothing else, so whatever it is unsure of it computes again.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import compress, count

import numpy as np
import numpy.typing as npt

from ..scheduling.proposals import MAX_CHECKED_TOKENS, Proposer
from ..scheduling.sequence import Int32, Key, Sequence
from ..step import StepInputs
from .step_runner import StepRunner, trash_decodes

logger = logging.getLogger(__name__)

MAX_BEHIND = 256  # tokens that it reads in one step of those that it does not know yet: beyond, others wait for it
_FEW = 32  # tokens of one sequence that are not counted as such: what was said since it was asked last
_READ_WITH_A_GUESS = 16  # tokens of a prompt that are read in the time of one guess, or more
MAX_STEP_TOKENS = MAX_BEHIND + MAX_CHECKED_TOKENS * _FEW
_TRIALS = 3


@dataclass(slots=True)
class _Known:
    """What the last call has left of a sequence. Since then nobody has written to its pages.

    Identities are those of its full pages: of all tokens up to their ends.
    """

    sequence: Sequence
    identities: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)  # pages of what is computed
    num_computed: int = 0


@dataclass(frozen=True, slots=True)
class _Row:
    sequence: Sequence
    start: int  # of what it computes first
    end: int
    num_wanted: int  # tokens that follow; 0 where not all before them are known

    @property
    def tokens(self) -> Int32:
        return self.sequence.tokens[self.start : self.end]


class DraftModel(Proposer):
    """Proposes what a smaller model says, drawn with the random numbers that the greater one will draw with."""

    def __init__(self, runner: StepRunner, *, num_pages: int, page_size: int, vocab_size: int, known_ids: int) -> None:
        """``runner`` has ``scratch_pages`` more pages than ``num_pages``. ``vocab_size`` ids can be proposed, and
        sequences with ids from ``known_ids`` on are beyond it.
        """
        self._runner = runner
        self._num_pages = num_pages
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._known_ids = known_ids
        self._filled: npt.NDArray[np.int64] = np.zeros(num_pages + 1, np.int64)  # the identity of a page; 0: none
        self._known: dict[Key, _Known] = {}
        self._proposals: dict[Key, list[int]] = {}
        self._is_sound = True

    @staticmethod
    def scratch_pages(page_size: int) -> int:
        """Pages for what is guessed of those that may be asked for at once, behind the last page of each."""
        return MAX_CHECKED_TOKENS * -(-MAX_CHECKED_TOKENS // page_size)

    def measure(self, other: StepRunner) -> None:
        """Finds out what a guess costs beside a step of the greater model."""
        self._runner.warm_up()
        decode = trash_decodes(1)
        own_s = min(self._runner.seconds_of(decode) for _ in range(_TRIALS))
        self.cost = own_s / min(other.seconds_of(decode) for _ in range(_TRIALS))
        logger.info("a guess of the draft model takes %.2f of a step", self.cost)

    def begin(self, wanted: list[tuple[Sequence, int]]) -> None:
        self._proposals = {}
        if not wanted or not self._is_sound:
            return
        try:
            self._guess(wanted)
        except Exception:  # nobody has asked for guesses
            self._is_sound = False
            logger.exception("the draft model failed; until the next restart nothing is guessed")

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int] | None:
        if not self._is_sound:
            return []
        proposals = self._proposals.get(sequence.key)
        return None if proposals is None else proposals[:max_tokens]

    def _guess(self, wanted: list[tuple[Sequence, int]]) -> None:
        rows = self._rows(wanted)
        known = {row.sequence.key: self._known[row.sequence.key] for row in rows}
        self._known = known  # of others it is found out again
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
        """What is computed first: what it does not know of each, as far as that is not too much at a time."""
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
        """Whether so many tokens may still follow that it pays, if the guesses save half a step for each of them."""
        return num_tokens * self.cost / _READ_WITH_A_GUESS <= num_following / 2

    def _num_known(self, sequence: Sequence) -> int:
        """Tokens whose keys and values are in the pages that the sequence has now."""
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
        """Leading pages that hold what they should, whoever has computed it."""
        is_filled = self._filled[table[: len(identities)]] == identities[: len(table)]
        return len(is_filled) if is_filled.all() else int(is_filled.argmin())

    def _note(self, row: _Row) -> None:
        """What the pages will hold once the row is computed."""
        known, size = self._known[row.sequence.key], self._page_size
        known.num_computed = row.end
        known.table = row.sequence.block_table[: -(-row.end // size)]
        first, num_full = row.start // size, row.end // size
        self._filled[known.table[first:]] = 0
        self._filled[known.table[first:num_full]] = known.identities[first:num_full]

    def _tables(self, rows: Seq[_Row]) -> Int32:
        """Block tables [rows, pages]: those of the sequences up to their last token, and scratch pages behind."""
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
        """Computes these tokens of each row, [rows]; what follows the last one of those that are asked."""
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
        """Whether one more is wanted of it."""
        proposals = self._proposals.setdefault(row.sequence.key, [])
        if token_id >= self._vocab_size:
            return False
        proposals.append(token_id)
        return len(proposals) < row.num_wanted and token_id < self._known_ids
