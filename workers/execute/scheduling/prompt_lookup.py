"""Prompt lookup: tokens that followed an earlier occurrence of the last ones are likely to follow again.

Source: Saxena 2023, "Prompt Lookup Decoding".
"""

from __future__ import annotations

import numpy as np

from .proposals import Proposer
from .sequence import Sequence

MIN_MATCH, MAX_MATCH = 2, 8  # tokens that must occur before; longer matches make no better proposals


class PromptLookup(Proposer):
    """Proposes what followed the same tokens in the prompt, or in the answer so far."""

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        return look_up(sequence, max_tokens)


def look_up(sequence: Sequence, max_tokens: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest possible suffix of the sequence.

    If the continuation reaches the end of the sequence it is repeated, so that in a loop as many tokens are proposed as
    may be.
    """
    tokens, count = sequence.tokens, sequence.num_tokens
    matches, length = np.flatnonzero(tokens[: count - 1] == tokens[count - 1]), 1
    while length < MAX_MATCH:
        longer = matches[matches >= length]
        longer = longer[tokens[longer - length] == tokens[count - 1 - length]]
        if not len(longer):
            break
        matches, length = longer, length + 1
    if length < MIN_MATCH:
        return []
    first = int(matches[-1]) + 1
    following: list[int] = tokens[first + np.arange(max_tokens) % (count - first)].tolist()
    return following
