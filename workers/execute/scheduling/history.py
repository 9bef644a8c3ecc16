"""The last steps, as numbers in bounded memory."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import islice
from typing import NamedTuple

from .audit import Stats
from .plan import Plan


class StepRecord(NamedTuple):
    """One step: what it computed and moved, how long that took, and what was left afterwards."""

    step: int
    launched_at: int  # ns
    elapsed_ns: int
    num_decodes: int
    num_prefill_tokens: int
    num_preempted: int
    num_swapped_out_pages: int
    num_swapped_in_pages: int
    num_waiting: int
    num_swapped: int
    num_running: int
    num_held_pages: int
    num_idle_pages: int
    num_used_host_pages: int

    @classmethod
    def of(cls, plan: Plan, stats: Stats, *, launched_at: int, collected_at: int) -> StepRecord:
        return cls(
            step=plan.step,
            launched_at=launched_at,
            elapsed_ns=collected_at - launched_at,
            num_decodes=plan.num_decodes,
            num_prefill_tokens=plan.num_prefill_tokens,
            num_preempted=len(plan.preempted),
            num_swapped_out_pages=len(plan.moves.swap_out),
            num_swapped_in_pages=len(plan.moves.swap_in),
            num_waiting=stats.num_waiting,
            num_swapped=stats.num_swapped,
            num_running=stats.num_prefilling + stats.num_ready + stats.num_decoding,
            num_held_pages=stats.num_held_pages,
            num_idle_pages=stats.num_idle_pages,
            num_used_host_pages=stats.num_host_pages - stats.num_free_host_pages,
        )


class HistorySummary(NamedTuple):
    """Of the steps that are remembered."""

    num_steps: int
    mean_batch_tokens: float
    mean_decodes: float
    median_step_ms: float
    slowest_step_ms: float


class StepHistory:
    """The last ``max_steps`` steps; older ones are forgotten."""

    def __init__(self, max_steps: int = 1024) -> None:
        self._records: deque[StepRecord] = deque(maxlen=max_steps)

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: StepRecord) -> None:
        self._records.append(record)

    def since(self, step: int) -> list[StepRecord]:
        """Those after ``step``, oldest first."""
        return [record for record in self._records if record.step > step]

    def last(self, num_steps: int) -> list[StepRecord]:
        """The newest, oldest first."""
        return list(islice(reversed(self._records), num_steps))[::-1]

    def summary(self) -> HistorySummary:
        if not self._records:
            return HistorySummary(0, 0.0, 0.0, 0.0, 0.0)
        elapsed_ms = [record.elapsed_ns / 1e6 for record in self._records]
        return HistorySummary(
            num_steps=len(self._records),
            mean_batch_tokens=statistics.fmean(r.num_decodes + r.num_prefill_tokens for r in self._records),
            mean_decodes=statistics.fmean(r.num_decodes for r in self._records),
            median_step_ms=statistics.median(elapsed_ms),
            slowest_step_ms=max(elapsed_ms),
        )
