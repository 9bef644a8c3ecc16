"""Concurrent prompts with a common beginning: one is computed, the others wait for what they share with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .chunks import is_repeated
from .groups import Groups
from .prefix import Match
from .sequence import Sequence, SequenceState, num_common

_WORTH_A_STEP = 64  # tokens; fewer, like the start of a chat template, count only as half of what is left


class Leader(NamedTuple):
    """A running sequence that computes what a waiting one, its follower, begins with."""

    sequence: Sequence
    num_alike: int  # tokens in full pages that both begin with


class SharedPrompts:
    """Finds a leader for each waiting prompt that is worth waiting for.

    Waiting takes no longer than computing the tokens again, and leaves the step to others. Only prompts are waited for,
    never output, so the wait ends with the last chunk of the leader. On a model with recurrent layers, the leader is
    told to leave a snapshot of its state where the two prompts diverge.
    """

    def __init__(self, groups: Groups, page_size: int) -> None:
        self._groups, self._page_size = groups, page_size

    def examine(self, sequence: Sequence, computing: Iterable[Sequence]) -> Match | None:
        """Set ``sequence.leader``, to one of ``computing`` or None; returns the cached part of ``sequence`` if that was
        looked up.

        It is not, as long as an earlier leader goes on: a prompt may have thousands of pages, and wait for many steps.
        """
        if sequence.leader is None or not self._leads(sequence.leader, sequence):
            found = self._groups.find(sequence)
            sequence.leader = self._find_leader(sequence, found, computing)
        else:
            found = None
        if sequence.leader is not None and (rows := sequence.leader.sequence.state_rows) is not None:
            rows.wanted.add(sequence.leader.num_alike)
        return found

    def _leads(self, leader: Leader, follower: Sequence) -> bool:
        """Whether an earlier leader still computes enough of what it has in common with its follower."""
        is_computing = leader.sequence.state is SequenceState.PREFILLING
        return is_computing and self._is_enough(leader.num_alike, follower, self._num_there(leader.sequence))

    def _find_leader(self, sequence: Sequence, match: Match, computing: Iterable[Sequence]) -> Leader | None:
        # It has its own pages, needs the same chunks as the first time, or the logits or states of its prompt.
        if sequence.host_table or is_repeated(sequence) or sequence.needs_whole_prompt:
            return None
        size, num_known = self._page_size, len(match.nodes) * self._page_size
        for other in computing:
            num_there = max(num_known, self._num_there(other))
            end = min(other.num_prompt_tokens, sequence.num_tokens - 1) // size * size
            if end <= num_there or not self._is_enough(end, sequence, num_known):
                continue
            if other.cache_salt != sequence.cache_salt:
                continue
            # Its next page comes first: to compare all of two long prompts that only begin alike takes much longer.
            there = slice(num_there, num_there + size)
            if not np.array_equal(sequence.tokens[there], other.tokens[there]):
                continue
            num_alike = num_common(sequence, other, end) // size * size
            if num_alike > num_there and self._is_enough(num_alike, sequence, num_known):
                return Leader(other, num_alike)
        return None

    def _num_there(self, leader: Sequence) -> int:
        """Tokens that others can share with it already."""
        return leader.tip.depth * self._page_size if leader.tip else 0

    def _is_enough(self, num_alike: int, sequence: Sequence, num_known: int) -> bool:
        """Whether to wait for the first ``num_alike`` tokens of ``sequence``, of which ``num_known`` are cached."""
        num_left = sequence.num_tokens - num_known
        return num_alike >= num_known + max(self._page_size, min(_WORTH_A_STEP, (num_left + 1) // 2))
