"""The measurements of a simulation, in bounded memory, and the resulting figures."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)
NS_A_MS = 1_000_000
GAP_NS = 1_000  # resolution of the times between tokens


class Measurements:
    """Of all replicas together. Times are simulated."""

    def __init__(self) -> None:
        self.ttft_ms = array("d")
        self.latency_ms = array("d")  # from the arrival to the last token
        self.wait_ms = array("d")  # from the arrival to the first step
        self.gaps: Counter[int] = Counter()  # between tokens, in units of GAP_NS
        self.counts: Counter[str] = Counter()
        self.num_requests_of: Counter[int] = Counter()  # by replica
        self.busy_ns: Counter[int] = Counter()
        self.first_ns: int | None = None
        self.last_ns = 0

    def arrived(self, replica: int, at_ns: int, num_prompt_tokens: int) -> None:
        self.first_ns = at_ns if self.first_ns is None else min(self.first_ns, at_ns)
        self.num_requests_of[replica] += 1
        self.counts["prompt_tokens"] += num_prompt_tokens

    def report(self) -> dict[str, Any]:
        """Every figure, as plain values: rates per second, times in ms."""
        counts, elapsed_s = self.counts, max(1, self.last_ns - (self.first_ns or 0)) / 1e9
        num_requests = sum(self.num_requests_of.values())
        return {
            "requests": num_requests,
            "finished": counts["finished"],
            "expired": counts["expired"],
            "refused": counts["refused"],
            "duration_s": round(elapsed_s, 3),
            "requests_per_second": round(counts["finished"] / elapsed_s, 3),
            "output_tokens_per_second": round(counts["output_tokens"] / elapsed_s, 1),
            "prompt_tokens_per_second": round(counts["prompt_tokens"] / elapsed_s, 1),
            "ttft_ms": _percentiles(self.ttft_ms),
            "inter_token_ms": self._gap_percentiles(),
            "latency_ms": _percentiles(self.latency_ms),
            "wait_ms": _percentiles(self.wait_ms),
            "steps": counts["steps"],
            "tokens_per_step": _ratio(counts["prefill_tokens"] + counts["decodes"], counts["steps"]),
            "decodes_per_step": _ratio(counts["decodes"], counts["steps"]),
            "busy": {f"replica {i}": round(ns / 1e9 / elapsed_s, 4) for i, ns in sorted(self.busy_ns.items())},
            "requests_of": {f"replica {i}": n for i, n in sorted(self.num_requests_of.items())},
            "cache_hit_rate": _ratio(counts["hit_tokens"], counts["queried_tokens"], 4),
            "cached_tokens": counts["hit_tokens"],
            "preemptions": counts["preemptions"],
            "swaps": counts["swaps"],
            "pages_held_most": counts["pages_held_most"],
        }

    def _gap_percentiles(self) -> dict[str, float | None]:
        if not self.gaps:
            return dict.fromkeys([*(f"p{p}" for p in PERCENTILES), "max"])
        values = np.array(sorted(self.gaps), np.int64)
        reached = np.cumsum([self.gaps[value] for value in values.tolist()])
        indices = [int(np.searchsorted(reached, p / 100 * reached[-1])) for p in PERCENTILES]
        unit_ms = GAP_NS / NS_A_MS
        named = {f"p{p}": round(float(values[i]) * unit_ms, 3) for p, i in zip(PERCENTILES, indices, strict=True)}
        return {**named, "max": round(float(values[-1]) * unit_ms, 3)}


def _percentiles(times_ms: Iterable[float]) -> dict[str, float | None]:
    times = np.array(times_ms)
    if not len(times):
        return dict.fromkeys([*(f"p{p}" for p in PERCENTILES), "max"])
    values = np.percentile(times, PERCENTILES).round(3).tolist()
    named = dict(zip((f"p{p}" for p in PERCENTILES), values, strict=True))
    return {**named, "max": round(float(times.max()), 3)}


def _ratio(part: float, whole: float, digits: int = 2) -> float:
    return round(part / whole, digits) if whole else 0.0
