"""Whether a waiting sequence may start: never, not yet, or now, with what is cached of it."""

from __future__ import annotations

from typing import NamedTuple

from .prefix import Match
from .roster import Roster
from .sequence import Sequence, SequenceState


class Verdict(NamedTuple):
    """How a waiting sequence ends without taking a step."""

    reason: str  # "stop" | "length" | "error"
    why: str = ""  # the message of an error


class Admission:
    """The limits set by the context and the pool, and by what runs already."""

    def __init__(self, roster: Roster, *, max_model_len: int, margin: float) -> None:
        """``margin``: the share of the pages that a new prompt must leave free while others run."""
        self._roster, self._cache, self._beams = roster, roster.cache, roster.beams
        self._max_model_len = max_model_len
        self._margin = margin

    def judge(self, sequence: Sequence) -> Verdict | None:
        """The end of a sequence that was already complete on arrival, or that even an empty pool could not hold."""
        reason = sequence.end_reason(self._max_model_len) if sequence.num_output_tokens else None
        if reason is not None:
            return Verdict(reason)
        num_places = self._cache.num_pages * self._cache.pool.page_size
        longest = min(self._max_model_len - min(1, sequence.max_tokens), num_places)
        if sequence.num_tokens > longest:
            why = f"prompt has {sequence.num_tokens} tokens, the limit is {longest}"
            return Verdict("length") if sequence.num_output_tokens else Verdict("error", why)
        num_pages = self._beams.num_pages(sequence)
        if num_pages > self._cache.num_pages:
            return Verdict("error", f"the beams may need {num_pages} pages, the limit is {self._cache.num_pages}")
        return None

    def may_start(self, sequence: Sequence, found: Match | None = None) -> Match | None:
        """The cached part of ``sequence``, ``found`` if that is known, or None while memory does not allow it to start.

        There must be room for all its tokens, and a margin for the growth of running sequences. If nothing runs there
        is nothing to protect, and one sequence always starts.
        """
        roster, cache, family = self._roster, self._cache, self._beams.family(sequence)
        if roster.running:
            if roster.fresh_are_held_back and not sequence.num_preemptions:
                return None
            # More tokens left than the single one of a decode: inlined, as this visits every sequence.
            growing = [
                s
                for s in roster.running.values()
                if s.num_tokens - s.num_computed_tokens > 1 or s.state is SequenceState.PREFILLING
            ]
            num_promised = sum(map(cache.num_missing, growing))
            num_kept = num_promised + max(1, self._margin * cache.num_pages)
            if not cache.has(num_kept + 1):
                return None  # whatever is cached, one page is needed
            match = roster.groups.find(sequence) if found is None else found
            if not cache.has(num_kept + cache.num_wanted(family, match)):
                return None
        else:
            match = roster.groups.find(sequence)
        return match if cache.has(1) and cache.may_enter(family, match) else None
