"""What the rows of a step ask of the sampler, from the least to the most: the step runs by the most that one asks."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from ..scheduling.sequence import Sequence


class SamplingKind(IntEnum):
    """How far the device gets without the host."""

    GREEDY = 0  # the greatest logit
    DRAWN = 1  # by temperature, and min-p
    CUT = 2  # by top-k or top-p too: the whole vocabulary is sorted
    HOST = 3  # logits are changed by what the host knows, or more of them is wanted: the host waits for the step


def kind_of(sequences: Iterable[Sequence]) -> SamplingKind:
    """The most that one of these asks; GREEDY for none."""
    return max((_kind(sequence) for sequence in sequences), default=SamplingKind.GREEDY)


def _kind(sequence: Sequence) -> SamplingKind:
    p = sequence.params
    changes_logits = (
        p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty or p.min_tokens or p.logit_bias
    )
    if changes_logits or p.logprobs is not None or p.is_beam_search or sequence.grammar is not None:
        return SamplingKind.HOST
    if p.is_greedy:
        return SamplingKind.GREEDY
    return SamplingKind.CUT if (p.top_k or 0) > 0 or p.top_p < 1 else SamplingKind.DRAWN
