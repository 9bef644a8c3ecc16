"""What a screen shows: the last answers of the pipeline, and what they were a moment before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...driver.standing import RequestLine, RequestList

HISTORY = 120  # samples of a sparkline at most
STAGES = ("prepare", "execute", "summarize")
ORDERS = ("arrival", "rate", "progress")
Stage = Mapping[str, Any]


class Sample(NamedTuple):
    """One look at the pipeline."""

    at_s: float  # time.monotonic
    stats: Mapping[str, Stage]
    requests: RequestList


@dataclass(slots=True)
class State:
    """The pipeline as far as it was seen."""

    run_dir: Path
    card: Mapping[str, Any]
    limits: Mapping[str, Any]
    order: str = ORDERS[0]
    is_paused: bool = False
    sample: Sample | None = None
    silent_since_s: float | None = None  # since when there is no answer, time.monotonic
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
        # Without a step there is no time of one: the gap in the line shows that nothing ran.
        self.step_times_ms.append(execute.get("step_ms_median", 0.0) if num_steps > 0 else 0.0)

    def miss(self, now_s: float) -> None:
        """There was no answer."""
        if self.silent_since_s is None:
            self.silent_since_s = now_s

    def next_order(self) -> None:
        self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]

    @property
    def num_restarts(self) -> int:
        """Lives of workers beyond their first."""
        stats = self.sample.stats if self.sample else {}
        return sum(max(0, stage.get("epoch", 1) - 1) for stage in stats.values())

    def lines(self) -> list[RequestLine]:
        """The requests in the order asked for; those that ended last."""
        lines = list(self.sample.requests.lines) if self.sample else []
        if self.order == "rate":
            lines.sort(key=lambda line: -(line.tokens_per_second or 0.0))
        elif self.order == "progress":
            lines.sort(key=lambda line: -line.num_tokens / max(line.max_tokens, 1))
        return sorted(lines, key=lambda line: line.state == "ended")
