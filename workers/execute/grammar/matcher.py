"""Matches one answer against its grammar: which tokens may come next."""

from __future__ import annotations

import threading
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ....protocol.arrays import Int32
from ....protocol.grammar import PARSER_LIMITS, tokenizer_options
from ....protocol.model_card import ModelCard
from ....protocol.reasoning import Channels, Reasoning, Tags
from ....protocol.tokenizer_files import load_tokenizer_json

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = npt.NDArray[np.uint8]  # [ceil(V / 8)], the bit of token t is bit t % 8 of byte t // 8


class GrammarError(Exception):
    """The answer cannot continue under its grammar; carries the reason."""


class Before(NamedTuple):
    """Reasoning before the form."""

    reasoning: Reasoning
    allowed: Bits  # all but the tokens that end an answer, which would then lack its form


class GrammarMatcher:
    """Follows the tokens of one sequence.

    Two threads may ask at once: if a step fails while its masks are computed, its rows are computed again before the
    first thread is done.

    Invariant: the matcher has consumed the first ``num_taken`` tokens of the form, with which the answer begins unless
    there is reasoning before it. It consumes the others when it is asked what may follow them, so a preempted or
    recovered sequence needs no special treatment.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, *, before: Before | None = None) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._before = before
        self._start: int | None = None  # index of the form's first token, once it is known
        self._num_taken = 0
        self._lock = threading.Lock()

    def allowed_after(self, output_tokens: Int32) -> Bits:
        """Which ids may follow these tokens, including the end of sequence where the answer may end.

        Raises:
            GrammarError: a token does not match the grammar, or matching has become too complex.
        """
        with self._lock:
            return self._allowed_after(output_tokens)

    def _allowed_after(self, output_tokens: Int32) -> Bits:
        if self._before is None:
            return self._allowed_in_form(output_tokens)
        reasoning, allowed_before = self._before
        if self._start is None:
            self._start = reasoning.find_form(output_tokens)
        if self._start is not None:
            return self._allowed_in_form(output_tokens[self._start :])
        if isinstance(reasoning, Tags) and reasoning.is_spent(output_tokens):
            return only(reasoning.end, self._vocab_size)
        if isinstance(reasoning, Channels) and (end := reasoning.ends_call(output_tokens)) is not None:
            return allowed_before | only(end, self._vocab_size)
        if len(output_tokens) or reasoning.first is None:
            return allowed_before
        return self._allowed_in_form(output_tokens) | only(reasoning.first, self._vocab_size)

    def _allowed_in_form(self, tokens: Int32) -> Bits:
        new = tokens[self._num_taken :].tolist()
        if new:
            self._matcher.consume_tokens(new)
            self._num_taken = len(tokens)
        allowed = np.zeros((self._vocab_size + 31) // 32, "<u4")
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error().partition("<non-verbose/>")[0].strip()[:200])
        return allowed.view(np.uint8)


class ReasoningLimit:
    """Ends the reasoning of one sequence when its budget is spent, and changes nothing else."""

    def __init__(self, reasoning: Tags, vocab_size: int) -> None:
        self._reasoning = reasoning
        self._vocab_size = vocab_size
        self.is_over = False  # nothing is left to limit

    def allowed_after(self, output_tokens: Int32) -> Bits | None:
        """Like that of ``GrammarMatcher``; None: everything."""
        reasoning = self._reasoning
        has_ended = reasoning.find_form(output_tokens) is not None or reasoning.is_calling(output_tokens)
        self.is_over = self.is_over or has_ended
        if self.is_over or not self._reasoning.is_spent(output_tokens):
            return None
        return only(self._reasoning.end, self._vocab_size)


def only(token_id: int, vocab_size: int) -> Bits:
    return _packed(np.arange(vocab_size) == token_id)


def _packed(is_allowed: npt.NDArray[np.bool_]) -> Bits:
    """As many bytes as a mask of llguidance has."""
    return np.packbits(np.pad(is_allowed, (0, -len(is_allowed) % 32)), bitorder="little")


def ids_of(bits: Bits) -> npt.NDArray[np.int64]:
    """The ids whose bits are set, in ascending order."""
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


def has_others(bits: Bits, token_ids: npt.NDArray[np.int64]) -> bool:
    """Whether the bit of any id other than these is set."""
    known = token_ids[token_ids < 8 * len(bits)]
    others = bits.copy()
    np.bitwise_and.at(others, known // 8, ~(1 << known % 8).astype(np.uint8))
    return bool(others.any())


class GrammarCompiler:
    """Makes matchers for one model. prepare has already compiled each grammar, so none takes long here."""

    def __init__(self, run_dir: Path, card: ModelCard) -> None:
        self._run_dir = run_dir
        self._card = card
        self._tokenizer: LLTokenizer | None = None

    @cached_property
    def _allowed_before(self) -> Bits:
        return _packed(~np.isin(np.arange(self._card.vocab_size), self._card.eos_token_ids))

    def compile(self, grammar: str, reasoning: Reasoning | None = None) -> GrammarMatcher:
        """``reasoning`` is what may come before the answer's form.

        Raises:
            GrammarError: the grammar does not compile.
        """
        from llguidance import LLMatcher, LLParserLimits  # an optional dependency

        limits = LLParserLimits(**PARSER_LIMITS)
        matcher = LLMatcher(self._load(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error()[:200])
        before = Before(reasoning, self._allowed_before) if reasoning else None
        return GrammarMatcher(matcher, self._card.vocab_size, before=before)

    def _load(self) -> LLTokenizer:
        """The tokenizer, loaded for the first grammar: it takes hundreds of milliseconds with a large vocabulary."""
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            self._tokenizer = LLTokenizer(load_tokenizer_json(self._run_dir), **tokenizer_options(self._card))
        return self._tokenizer
