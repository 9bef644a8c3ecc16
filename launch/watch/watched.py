"""The latest samples of a watched pipeline, and rates derived from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...driver.first_epochs import first_epochs
from ...driver.standing import RequestList

HISTORY = 120  # maximum number of samples in a sparkline
Stage = Mapping[str, Any]


class Sample(NamedTuple):
    """One sample of the pipeline."""

    at_s: float  # time.monotonic
    stats: Mapping[str, Stage]
    requests: RequestList


@dataclass(slots=True)
class Watched:
    """The pipeline as observed so far."""

    run_dir: Path
    card: Mapping[str, Any]
    limits: Mapping[str, Any]
    sample: Sample | None = None
    silent_since_s: float | None = None  # start of a period without answers, time.monotonic
    steps_per_s: float = 0.0
    token_rates: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    step_times_ms: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def see(self, sample: Sample) -> None:
        """Take a new sample."""
        before, self.sample, self.silent_since_s = self.sample, sample, None
        execute = sample.stats["execute"]
        self.token_rates.append(sample.stats["summarize"].get("tokens_per_second", 0.0))
        if before is None:
            self.step_times_ms.append(execute.get("step_ms_median", 0.0))
            return
        num_steps = execute.get("steps", 0) - before.stats["execute"].get("steps", 0)
        self.steps_per_s = max(0.0, num_steps / max(sample.at_s - before.at_s, 1e-3))
        # Without a step there is no duration: the gap in the curve shows that nothing ran.
        self.step_times_ms.append(execute.get("step_ms_median", 0.0) if num_steps > 0 else 0.0)

    def miss(self, now_s: float) -> None:
        """There was no answer."""
        if self.silent_since_s is None:
            self.silent_since_s = now_s

    @property
    def num_restarts(self) -> int:
        """Starts of workers beyond the first one under the current driver."""
        stats, first = self.sample.stats if self.sample else {}, first_epochs(self.run_dir)
        return sum(max(0, stage.get("epoch", 1) - first[role]) for role, stage in stats.items())

    @property
    def trouble(self) -> str:
        """The stages that are not ready; empty if all are."""
        stats = self.sample.stats if self.sample else {}
        return ", ".join(f"{role} is {stage['phase']}" for role, stage in stats.items() if stage["phase"] != "ready")
