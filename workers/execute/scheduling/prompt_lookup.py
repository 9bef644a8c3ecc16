"""Prompt lookup: what followed the same tokens before is likely to follow them again.

Source: Saxena 2023, "Prompt Lookup Decoding".
"""

from __future__ import annotations

import numpy as np

from .proposals import Proposer
from .sequence import Sequence

MIN_MATCH, MAX_MATCH = 2, 8  # tokens that must have been said before; more of them make no better proposal


class PromptLookup(Proposer):
    """Proposes what the prompt, or the answer so far, has said before."""

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        return look_up(sequence, max_tokens)


def look_up(sequence: Sequence, max_tokens: int) -> list[int]:
    """What followed the longest end of the sequence that stands earlier in it, too, the latest such place.

    Where it goes on up to the end it is taken to begin again: of a loop as much is proposed as is wanted.
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
