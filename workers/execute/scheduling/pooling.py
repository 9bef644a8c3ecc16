"""How the embedding of a prompt is made of the hidden states of its tokens.

Source: the poolings and their names are those of sentence-transformers, Reimers and Gurevych 2019.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ....protocol.arrays import Float32, Float64

if TYPE_CHECKING:
    from .sequence import Sequence


LAST_TOKEN, MEAN, MEAN_SQRT, WEIGHTED_MEAN = "lasttoken", "mean", "mean_sqrt_len_tokens", "weightedmean"
POOLINGS = (LAST_TOKEN, MEAN, MEAN_SQRT, WEIGHTED_MEAN)


class Pooling(NamedTuple):
    """That of a checkpoint."""

    mode: str = LAST_TOKEN  # one of POOLINGS
    normalizes: bool = True  # whether the result is scaled to length 1

    @property
    def takes_all(self) -> bool:
        """Whether the states of all tokens are needed, also of those whose keys and values are cached."""
        return self.mode != LAST_TOKEN

    def rows(self, num_prompt_tokens: int, num_pooled_tokens: int, chunk: range) -> range:
        """The positions in ``chunk`` whose states are needed; ``num_pooled_tokens`` leading ones are there already."""
        first = num_pooled_tokens if self.takes_all else num_prompt_tokens - 1
        return range(max(first, chunk.start), max(first, chunk.stop))

    def add(self, total: Float64, states: Float32, start: int) -> None:
        """Add ``states`` [tokens, channels] to ``total`` as they are weighed; the first is that of token ``start``.

        Row by row, which stays in the caches: a sum of all of them at once takes up to 30 times as long.
        """
        for position, state in enumerate(states, start):
            total += state if self.mode != WEIGHTED_MEAN else state.astype(np.float64) * (position + 1)

    def finish(self, total: Float64, num_tokens: int) -> Float32:
        """The embedding, from the sum of the weighed states of a prompt. Not finite if that has no length to scale."""
        if self.mode == MEAN:
            total = total / num_tokens
        elif self.mode == MEAN_SQRT:
            total = total / np.sqrt(num_tokens)
        elif self.mode == WEIGHTED_MEAN:
            total = total / (num_tokens * (num_tokens + 1) / 2)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (total / np.sqrt(np.square(total).sum()) if self.normalizes else total).astype(np.float32)


LAST_STATE = Pooling()


def pool(sequence: Sequence, start: int, states: Float32) -> Float32 | None:
    """Add ``states`` [tokens, channels], those of the tokens from ``start`` on, to the sum of the sequence; returns its
    embedding, which has the first ``embedding_size`` channels, once they are complete.

    In 64 bits and one by one, so that it does not depend on how a prompt was divided into chunks.

    Source of taking the first channels: Matryoshka representation learning, Kusupati et al. 2022.
    """
    pooling, end = sequence.pooling, start + len(states)
    states = states[:, : sequence.embedding_size]
    total = np.zeros(states.shape[1]) if sequence.pooled is None else sequence.pooled.copy()
    pooling.add(total, states, start)
    sequence.pooled = total
    return pooling.finish(total, end) if end == sequence.num_prompt_tokens else None
