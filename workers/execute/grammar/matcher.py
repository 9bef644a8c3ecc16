"""Matches one answer against its grammar: which tokens may come next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ....protocol.grammar import PARSER_LIMITS, tokenizer_options
from ....protocol.model_card import ModelCard
from ....protocol.reasoning import ReasoningTokens
from ....protocol.tokenizer_files import TOKENIZER_FILE

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = npt.NDArray[np.uint8]  # [ceil(V / 8)], the bit of token t is bit t % 8 of byte t // 8
Int32 = npt.NDArray[np.int32]


class GrammarError(Exception):
    """The answer cannot continue under its grammar; carries the reason."""


class GrammarMatcher:
    """Follows the tokens of one sequence. Not thread-safe.

    Invariant: the matcher has consumed the first ``num_taken`` tokens of the answer. It consumes the others when it is
    asked what may follow them, so a preempted or recovered sequence needs no special treatment.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        *,
        reasoning: ReasoningTokens | None = None,
        free: Bits | None = None,
    ) -> None:
        """With ``reasoning``, the answer may begin with it, in which the tokens ``free`` are allowed."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_taken = 0  # tokens of the form
        self._reasoning = reasoning
        self._free = free
        self._start: int | None = None if reasoning else 0  # index of the form's first token, once it is known

    def allowed_after(self, output_tokens: Int32) -> Bits:
        """Which ids may follow these tokens, including the end of sequence where the answer may end.

        Raises:
            GrammarError: a token does not match the grammar, or matching has become too complex.
        """
        if self._start is None:
            self._start = self._start_in(output_tokens)
        if self._start is not None:
            return self._allowed_in_form(output_tokens[self._start :])
        assert self._reasoning is not None, "otherwise the form starts with the answer"
        assert self._free is not None, "it comes with the reasoning"
        if len(output_tokens) or self._reasoning.is_open:
            return self._free
        return self._allowed_in_form(output_tokens) | _packed(np.arange(self._vocab_size) == self._reasoning.start)

    def _start_in(self, output_tokens: Int32) -> int | None:
        """Where the form starts: behind the reasoning, or at once if the answer does not begin with any."""
        assert self._reasoning is not None, "otherwise the form starts with the answer"
        start, end, is_open = self._reasoning
        if len(output_tokens) and not is_open and output_tokens[0] != start:
            return 0
        places = np.flatnonzero(output_tokens == end)
        return int(places[0]) + 1 if len(places) else None

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
        # Within reasoning. An answer that ended there would lack its form.
        is_free = np.ones(card.vocab_size, bool)
        is_free[list(card.eos_token_ids)] = False
        self._free = _packed(is_free)

    def compile(self, grammar: str, reasoning: ReasoningTokens | None = None) -> GrammarMatcher:
        """``reasoning`` is what may come before the answer's form.

        Raises:
            GrammarError: the grammar does not compile.
        """
        from llguidance import LLMatcher, LLParserLimits  # an optional dependency

        limits = LLParserLimits(**PARSER_LIMITS)
        matcher = LLMatcher(self._load(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error()[:200])
        return GrammarMatcher(matcher, self._card.vocab_size, reasoning=reasoning, free=self._free)

    def _load(self) -> LLTokenizer:
        """The tokenizer, loaded for the first grammar: it takes hundreds of milliseconds with a large vocabulary."""
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            tokenizer_json = (self._run_dir / TOKENIZER_FILE).read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(tokenizer_json, **tokenizer_options(self._card))
        return self._tokenizer
