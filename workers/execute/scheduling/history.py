"""The most recent steps, as numbers in bounded memory."""

from __future__ import annotations

from array import array
from collections import deque
from itertools import islice
from typing import NamedTuple

import numpy as np

from .plan import Plan
from .scheduler import Scheduler


class StepRecord(NamedTuple):
    """One step: what it computed and moved, how long that took, and the state after it."""

    step: int
    began_at: int  # ns
    elapsed_ns: int
    num_decodes: int
    num_proposed_tokens: int
    num_prefill_tokens: int
    num_preempted: int
    num_swapped_out_pages: int
    num_swapped_in_pages: int
    num_waiting: int
    num_swapped: int
    num_running: int
    num_held_pages: int  # including those in limbo
    num_idle_pages: int
    num_used_host_pages: int

    @classmethod
    def of(cls, plan: Plan, scheduler: Scheduler, *, began_at: int, collected_at: int) -> StepRecord:
        """Right after the step. Uses only numbers that are kept anyway, as this runs after every step."""
        roster, cache = scheduler.roster, scheduler.cache
        return cls(
            step=plan.step,
            began_at=began_at,
            elapsed_ns=collected_at - began_at,
            num_decodes=plan.num_decodes + plan.num_checked,
            num_proposed_tokens=sum(len(chunk.proposed) for chunk in plan.checked),
            num_prefill_tokens=plan.num_prefill_tokens,
            num_preempted=len(plan.preempted),
            num_swapped_out_pages=len(plan.moves.swap_out),
            num_swapped_in_pages=len(plan.moves.swap_in),
            num_waiting=len(roster.waiting),
            num_swapped=roster.num_swapped,
            num_running=len(roster.running),
            num_held_pages=cache.pool.num_held,
            num_idle_pages=cache.pool.num_idle,
            num_used_host_pages=cache.host.num_pages - cache.host.num_free,
        )


class HistorySummary(NamedTuple):
    """A summary of the remembered steps."""

    num_steps: int
    mean_batch_tokens: float
    mean_decodes: float
    median_step_ms: float
    slowest_step_ms: float


class StepHistory:
    """The last ``max_steps`` steps."""

    def __init__(self, max_steps: int = 1024) -> None:
        self._records: deque[StepRecord] = deque(maxlen=max_steps)
        # The summarized values as columns: frequent summaries over records took 2 % of the time of short steps.
        self._elapsed_ns, self._decodes, self._tokens = (array("q", bytes(8 * max_steps)) for _ in range(3))
        self._num_appended = 0

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: StepRecord) -> None:
        self._records.append(record)
        place = self._num_appended % len(self._elapsed_ns)
        self._elapsed_ns[place] = record.elapsed_ns
        self._decodes[place] = record.num_decodes
        self._tokens[place] = record.num_decodes + record.num_proposed_tokens + record.num_prefill_tokens
        self._num_appended += 1

    def last(self, num_steps: int) -> list[StepRecord]:
        """The newest records, oldest first."""
        return list(islice(reversed(self._records), num_steps))[::-1]

    def summary(self) -> HistorySummary:
        if not self._records:
            return HistorySummary(0, 0.0, 0.0, 0.0, 0.0)
        columns = (self._elapsed_ns, self._decodes, self._tokens)
        elapsed_ns, decodes, tokens = (np.frombuffer(c, np.int64, len(self._records)) for c in columns)
        return HistorySummary(
            num_steps=len(self._records),
            mean_batch_tokens=float(tokens.mean()),
            mean_decodes=float(decodes.mean()),
            median_step_ms=float(np.median(elapsed_ns)) / 1e6,
            slowest_step_ms=float(elapsed_ns.max()) / 1e6,
        )
