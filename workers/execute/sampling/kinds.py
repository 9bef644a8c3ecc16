"""What the rows of a step need from the sampler, from least to most; a step runs with the most any row needs."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from ..scheduling.sequence import Sequence


class SamplingKind(IntEnum):
    """How much of the sampling the device can do without the host."""

    GREEDY = 0  # the greatest logit
    DRAWN = 1  # by temperature, and min-p
    CUT = 2  # by top-k or top-p as well: the whole vocabulary is sorted
    HOST = 3  # the host changes logits or needs more than the token: it waits for the step


def kind_of(sequences: Iterable[Sequence]) -> SamplingKind:
    """The most that any of these needs; GREEDY if there are none."""
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
