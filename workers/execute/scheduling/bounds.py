"""Which requests can never be served, no matter how long they wait."""

from __future__ import annotations

from typing import NamedTuple

from .beams import Beams
from .cache import PageCache
from .sequence import Sequence


class Verdict(NamedTuple):
    """How a waiting sequence ends without taking a step."""

    reason: str  # "stop" | "length" | "error"
    why: str = ""  # the message of an error


class Bounds:
    """The limits set by the context and the pool."""

    def __init__(self, max_model_len: int, cache: PageCache, beams: Beams) -> None:
        self._max_model_len = max_model_len
        self._cache = cache
        self._beams = beams

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
