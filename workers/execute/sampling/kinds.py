"""What the rows of a step need from the sampler, from least to most; a step runs with the most any row needs."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from ..scheduling.sequence import Sequence


class SamplingKind(IntEnum):
    """How much has to be done to choose the tokens. A CUDA graph can include the first three."""

    GREEDY = 0  # the greatest logit
    DRAWN = 1  # by temperature, and min-p
    CUT = 2  # by top-k or top-p as well
    EDITED = 3  # the host changes logits, or wants logprobs
    HOST = 4  # beams: the host chooses, so it waits for the step


def kind_of(sequences: Iterable[Sequence]) -> SamplingKind:
    """The most that any of these needs; GREEDY if there are none."""
    return max((_kind(sequence) for sequence in sequences), default=SamplingKind.GREEDY)


def drawing_kind(sequences: Iterable[Sequence]) -> SamplingKind:
    """How the tokens are drawn from logits that have been changed: at most CUT."""
    return max((_drawing_kind(sequence) for sequence in sequences), default=SamplingKind.GREEDY)


def _kind(sequence: Sequence) -> SamplingKind:
    p = sequence.params
    if p.is_beam_search:
        return SamplingKind.HOST
    changes_logits = (
        p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty or p.min_tokens or p.logit_bias
    )
    if changes_logits or p.logprobs is not None or sequence.grammar is not None:
        return SamplingKind.EDITED
    return _drawing_kind(sequence)


def _drawing_kind(sequence: Sequence) -> SamplingKind:
    p = sequence.params
    if p.is_greedy:
        return SamplingKind.GREEDY
    return SamplingKind.CUT if (p.top_k or 0) > 0 or p.top_p < 1 else SamplingKind.DRAWN
