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

    def weigh(self, states: Float64, start: int) -> Float64:
        """``states`` [tokens, channels] as they are summed up; the first is that of token ``start``."""
        if self.mode != WEIGHTED_MEAN:
            return states
        return states * np.arange(start + 1, start + 1 + len(states), dtype=np.float64)[:, None]

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

    In 64 bits and one by one, so that it does not depend on how a prompt was divided into chunks. States that are
    there already, because a preempted sequence is computed again, change nothing.

    Source of taking the first channels: Matryoshka representation learning, Kusupati et al. 2022.
    """
    pooling, end = sequence.pooling, start + len(states)
    if pooling.takes_all:
        states, start = states[max(0, sequence.num_pooled_tokens - start) :], max(start, sequence.num_pooled_tokens)
    weighed = pooling.weigh(states[:, : sequence.embedding_size].astype(np.float64), start)
    if sequence.pooled is not None:
        weighed = np.concatenate([sequence.pooled[None], weighed])
    sequence.pooled = np.add.accumulate(weighed, axis=0)[-1]
    return pooling.finish(sequence.pooled, end) if end == sequence.num_prompt_tokens else None
