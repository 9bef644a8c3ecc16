"""Histograms of what requests cost, over all of them.

They are kept here because every request ends here exactly once, whoever sent it and however many gateways there are.
Like any scraped counters, they restart at zero with this worker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...protocol.messages import LEDGER_STAGES
from .ledger import Ledger

_FAST_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_GAPS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))


class Histogram:
    """Counts values by the smallest of ``bounds`` that is not below them; the last count is for those above all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._bounds_on_wire = np.array(bounds), list(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def observe(self, values: float | npt.NDArray[np.float64]) -> None:
        if isinstance(values, float):
            self._counts[bisect_left(self._bounds_on_wire, values)] += 1
            self._sum += values
        else:
            np.add.at(self._counts, np.searchsorted(self._bounds, values), 1)
            self._sum += float(np.sum(values))

    def to_wire(self) -> dict[str, Any]:
        return {"bounds": self._bounds_on_wire, "counts": self._counts.tolist(), "sum": self._sum}


class RequestHistograms:
    """Over all requests that ended since this worker started; times in seconds."""

    def __init__(self) -> None:
        self._histograms = {
            "ttft_s": Histogram(_FAST_S),
            "inter_token_s": Histogram(_GAPS_S),
            "time_per_output_token_s": Histogram(_GAPS_S),
            "e2e_s": Histogram(_REQUEST_S),
            "queue_s": Histogram(_REQUEST_S),
            "prefill_s": Histogram(_REQUEST_S),
            "decode_s": Histogram(_REQUEST_S),
            "inference_s": Histogram(_REQUEST_S),
            "prompt_tokens": Histogram(_TOKENS),
            "output_tokens": Histogram(_TOKENS),
        }
        self._stages_s = dict.fromkeys(LEDGER_STAGES, 0.0)

    def observe(self, ledger: Ledger, token_times_ns: Sequence[int], num_prompt_tokens: int) -> None:
        """Add a request that ended. ``token_times_ns``: when each of its tokens was produced."""
        stages_s = {stage: ns / 1e9 for stage, ns in ledger.stages_ns.items()}
        for stage, seconds in stages_s.items():
            self._stages_s[stage] += seconds
        values = {
            "e2e_s": ledger.wall_ns / 1e9,
            "queue_s": stages_s["queue"] + stages_s["credit"] + stages_s["schedule"],
            "prefill_s": stages_s["prefill"],
            "decode_s": stages_s["decode"],
            "inference_s": stages_s["prefill"] + stages_s["decode"],
            "prompt_tokens": float(num_prompt_tokens),
            "output_tokens": float(len(token_times_ns)),
        }
        if ledger.ttft_ms is not None:
            values["ttft_s"] = ledger.ttft_ms / 1e3
        for name, value in values.items():
            self._histograms[name].observe(value)
        if len(token_times_ns) > 1:
            gaps_s = np.diff(np.array(token_times_ns, np.float64)) / 1e9
            self._histograms["inter_token_s"].observe(gaps_s)
            self._histograms["time_per_output_token_s"].observe(float(gaps_s.mean()))

    def to_wire(self) -> dict[str, Any]:
        """By name; ``stages_s`` has the total seconds spent in each stage by all requests."""
        return {**{name: each.to_wire() for name, each in self._histograms.items()}, "stages_s": self._stages_s}
