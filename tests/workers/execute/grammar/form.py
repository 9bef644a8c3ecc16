"""A form that needs no compiler: about half of the ids fit at each place, depending on all before it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from triptych.workers.execute.grammar.matcher import GrammarMatcher


def fitting_ids(tokens: Iterable[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """The ids that may follow these tokens of the form, ascending."""
    state = sum((place + 3) * (token + 1) for place, token in enumerate(tokens))
    return np.flatnonzero((np.arange(vocab_size) * 31 + state) % 5 < 2)


class _Form:
    """The part of llguidance's matcher that ``GrammarMatcher`` uses."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokens: list[int] = []
        self._error = ""

    def consume_tokens(self, tokens: list[int]) -> None:
        for token_id in tokens:
            if token_id not in fitting_ids(self._tokens, self._vocab_size):
                self._error = f"{token_id} does not fit after {self._tokens}"
            self._tokens.append(token_id)

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        is_allowed = np.isin(np.arange(8 * num_bytes), fitting_ids(self._tokens, self._vocab_size))
        ctypes.memmove(address, np.packbits(is_allowed, bitorder="little").tobytes(), num_bytes)

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error


def make_form(vocab_size: int) -> GrammarMatcher:
    form: Any = _Form(vocab_size)
    return GrammarMatcher(form, vocab_size)
