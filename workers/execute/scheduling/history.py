"""The most recent steps, as numbers in bounded memory."""

from __future__ import annotations

from array import array
from collections import deque
from itertools import islice
from typing import NamedTuple

import numpy as np

from .plan import Plan


class StepRecord(NamedTuple):
    """One step: what it computed, and how long that took."""

    step: int
    began_at: int  # ns
    elapsed_ns: int
    num_decodes: int
    num_proposed_tokens: int
    num_prefill_tokens: int
    num_preempted: int

    @classmethod
    def of(cls, plan: Plan, *, began_at: int, collected_at: int) -> StepRecord:
        return cls(
            step=plan.step,
            began_at=began_at,
            elapsed_ns=collected_at - began_at,
            num_decodes=plan.num_decodes + plan.num_checked,
            num_proposed_tokens=sum(len(chunk.proposed) for chunk in plan.checked),
            num_prefill_tokens=plan.num_prefill_tokens,
            num_preempted=len(plan.preempted),
        )


class HistorySummary(NamedTuple):
    """A summary of the remembered steps."""

    mean_batch_tokens: float
    median_step_ms: float
    slowest_step_ms: float


class StepHistory:
    """The last ``max_steps`` steps."""

    def __init__(self, max_steps: int = 1024) -> None:
        self._records: deque[StepRecord] = deque(maxlen=max_steps)
        # The summarized values as columns: frequent summaries over records took 2 % of the time of short steps.
        self._elapsed_ns, self._tokens = (array("q", bytes(8 * max_steps)) for _ in range(2))
        self._num_appended = 0

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: StepRecord) -> None:
        self._records.append(record)
        place = self._num_appended % len(self._elapsed_ns)
        self._elapsed_ns[place] = record.elapsed_ns
        self._tokens[place] = record.num_decodes + record.num_proposed_tokens + record.num_prefill_tokens
        self._num_appended += 1

    def last(self, num_steps: int) -> list[StepRecord]:
        """The newest records, oldest first."""
        return list(islice(reversed(self._records), num_steps))[::-1]

    def summary(self) -> HistorySummary:
        if not self._records:
            return HistorySummary(0.0, 0.0, 0.0)
        columns = (self._elapsed_ns, self._tokens)
        elapsed_ns, tokens = (np.frombuffer(column, np.int64, len(self._records)) for column in columns)
        return HistorySummary(
            mean_batch_tokens=float(tokens.mean()),
            median_step_ms=float(np.median(elapsed_ns)) / 1e6,
            slowest_step_ms=float(elapsed_ns.max()) / 1e6,
        )
