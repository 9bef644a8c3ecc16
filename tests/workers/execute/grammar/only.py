"""A grammar that needs no compiler."""

from __future__ import annotations

import numpy as np

from triptych.protocol.arrays import Int32
from triptych.workers.execute.grammar.matcher import Bits, GrammarError, GrammarMatcher


class Only(GrammarMatcher):
    """Allows some ids; none at all is an error."""

    def __init__(self, *allowed: int, vocab_size: int = 3000) -> None:
        self._allowed, self._vocab_size = allowed, vocab_size

    def allowed_after(self, output_tokens: Int32) -> Bits:
        if not self._allowed:
            raise GrammarError("nothing fits")
        return np.packbits(np.isin(np.arange(self._vocab_size), self._allowed), bitorder="little")
