"""Concurrent prompts with a common beginning: one is computed, the others wait for what they share with it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .chunks import is_repeated
from .prefix import Match
from .sequence import Sequence, num_common

_WORTH_A_STEP = 64  # tokens; fewer, like the start of a chat template, count only as half of what is left


def is_being_computed(sequence: Sequence, match: Match, computing: Iterable[Sequence], page_size: int) -> bool:
    """Whether one of ``computing`` computes tokens of ``sequence`` after ``match``, and enough to wait for them.

    Waiting takes no longer than computing them again, and leaves the step to others. Only prompts are waited for, never
    output, so the wait ends with the last chunk of the other prompt. On a model with recurrent layers, the other
    sequence is told to leave a snapshot of its state where the two prompts diverge.
    """
    # It has its own pages, needs the same chunks as the first time, or needs the logits of its prompt.
    if sequence.host_table or is_repeated(sequence) or not sequence.is_scored:
        return False
    num_known = len(match.nodes) * page_size
    least = num_known + max(page_size, min(_WORTH_A_STEP, (sequence.num_tokens - num_known + 1) // 2))
    for other in computing:
        num_there = max(num_known, other.tip.depth * page_size if other.tip else 0)
        end = min(other.num_prompt_tokens, sequence.num_tokens - 1) // page_size * page_size
        if end <= num_there or end < least or other.cache_salt != sequence.cache_salt:
            continue
        # Its next page comes first: to compare all of two long prompts that only begin alike takes much longer.
        there = slice(num_there, num_there + page_size)
        if not np.array_equal(sequence.tokens[there], other.tokens[there]):
            continue
        num_alike = num_common(sequence, other, end) // page_size * page_size
        if num_alike > num_there and num_alike >= least:
            if other.state_rows is not None:
                other.state_rows.wanted.add(num_alike)
            return True
    return False
