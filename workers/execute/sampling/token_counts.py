"""The tokens that a sequence has, for penalties, counted as it grows: contexts may have a hundred thousand tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..scheduling.sequence import Sequence


class TokenCounts:
    """Each token of the prompt and the output, or of the output only, and how often it is in the output.

    Invariant: all of ``tokens[:num_tokens]`` are counted, as tokens of a sequence never change.
    """

    def __init__(self, sequence: Sequence, *, has_prompt: bool) -> None:
        known = sequence.tokens[: sequence.num_tokens]
        self.ids = np.unique(known if has_prompt else sequence.output_tokens).astype(np.int64)  # [n]
        self.in_output: npt.NDArray[np.float32] = np.zeros(len(self.ids), np.float32)  # [n]
        produced, counts = np.unique(sequence.output_tokens, return_counts=True)
        self.in_output[np.searchsorted(self.ids, produced)] = counts
        self.num_tokens = sequence.num_tokens

    def update(self, sequence: Sequence) -> None:
        """Count the tokens that came since."""
        for token_id in sequence.tokens[self.num_tokens : sequence.num_tokens].tolist():
            places = np.flatnonzero(self.ids == token_id)
            if len(places):
                self.in_output[places[0]] += 1
            else:
                self.ids = np.append(self.ids, np.int64(token_id))
                self.in_output = np.append(self.in_output, np.float32(1))
        self.num_tokens = sequence.num_tokens


def count_tokens(sequence: Sequence) -> TokenCounts:
    """With the tokens of the prompt if these have a penalty."""
    counts = sequence.token_counts
    if not isinstance(counts, TokenCounts) or counts.num_tokens > sequence.num_tokens:
        counts = TokenCounts(sequence, has_prompt=sequence.params.repetition_penalty != 1.0)
    else:
        counts.update(sequence)
    # The tokens of a beam do change, as it goes on from another one.
    sequence.token_counts = None if sequence.is_beam else counts
    return counts
