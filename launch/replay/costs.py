"""The cost of a simulated step: as given, or fitted to recorded steps."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...protocol.errors import ConfigError
from ...workers.execute.scheduling.cost import Prices, Work, fit_prices
from .trace_file import malformed, read_json_lines

MIN_STEPS = 8  # fewer are not enough to fit four prices
_MOST_BETWEEN_MS = 100.0  # between two steps; anything longer is an anomaly of the machine


@dataclass(slots=True)
class RecordedSteps:
    """The steps of a trace, reduced to what determines their cost."""

    works: list[Work] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)  # from the end of one step to the plan of the next

    @classmethod
    def read(cls, path: Path) -> RecordedSteps:
        """Raises ConfigError if the file is not a trace."""
        steps, collected_ns = cls(), None  # the end of the last step, if work was left after it
        for number, line in read_json_lines(path):
            try:
                if "step" not in line:
                    collected_ns = None if "trace" in line else collected_ns
                    continue
                if collected_ns is not None:
                    steps.between_ms.append(min(_MOST_BETWEEN_MS, (line["planned_ns"] - collected_ns) / 1e6))
                collected_ns = line["collected_ns"] if line["waiting"] + line["running"] else None
                if (work := _work_of(line)).num_reads:
                    steps.works.append(work)
                    steps.times_ms.append((line["collected_ns"] - line["planned_ns"]) / 1e6)
            except (KeyError, TypeError, ValueError) as error:
                raise malformed(path, number, error) from error
        return steps

    def prices(self, path: Path) -> Prices:
        """Raises ConfigError if there are too few steps."""
        if len(self.works) < MIN_STEPS:
            raise ConfigError(f"{path} has {len(self.works)} steps, costs need {MIN_STEPS}", param="file")
        prices = fit_prices(self.works, self.times_ms)
        between_ms = statistics.fmean(self.between_ms) if self.between_ms else 0.0
        return prices._replace(step=prices.step + between_ms)


def _work_of(line: dict[str, Any]) -> Work:
    # The context of a decode is not recorded; ``reads`` is the total read by the step.
    num_prefill_tokens = sum(num_tokens for _, _, num_tokens in line.get("prefills", ()))
    return Work(num_prefill_tokens, len(line.get("decodes", ())), line.get("reads", 0))
