"""What the client measured of one request. Times are time.perf_counter seconds from the start of the measurement."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class Record:
    """A request from its arrival, which does not wait for other requests, to its end.

    Latencies count from ``scheduled_s``: the time a request waits for a late client, or for its turn under
    ``max_concurrency`` at a given rate, is latency to its sender (Tene's "coordinated omission").
    """

    index: int
    scheduled_s: float
    sent_s: float = 0.0
    event_times_s: list[float] = field(default_factory=list)  # of every event that carried tokens
    ended_s: float | None = None  # None: it failed
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None  # a code, or "http_503", or the name of an exception
    message: str = ""  # of the error
    stages_ms: dict[str, float] | None = None  # the ledger, if the server reports it

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_ms(self) -> float | None:
        return (self.event_times_s[0] - self.scheduled_s) * 1e3 if self.event_times_s else None

    @property
    def e2e_ms(self) -> float | None:
        return None if self.ended_s is None else (self.ended_s - self.scheduled_s) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Gaps between events: if a server sends several tokens in one event, the reader sees the longer gap."""
        times = self.event_times_s
        return [(after - before) * 1e3 for before, after in pairwise(times)]

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for fewer than two."""
        if self.num_output_tokens < 2 or len(self.event_times_s) < 2:
            return None
        return (self.event_times_s[-1] - self.event_times_s[0]) * 1e3 / (self.num_output_tokens - 1)

    @property
    def tokens_per_second(self) -> float | None:
        return 1e3 / self.tpot_ms if self.tpot_ms else None

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "scheduled_s": self.scheduled_s,
            "sent_s": self.sent_s,
            "ended_s": self.ended_s,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "e2e_ms": self.e2e_ms,
            "gaps_ms": self.gaps_ms,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "message": self.message,
            "stages_ms": self.stages_ms,
        }
