"""The state of the terminal screen: the watched pipeline, and what was selected with keys."""

from __future__ import annotations

from dataclasses import dataclass

from ...driver.standing import RequestLine
from ..watch.watched import Watched

ORDERS = ("arrival", "rate", "progress")


@dataclass(slots=True)
class State(Watched):
    """The pipeline and the screen."""

    order: str = ORDERS[0]
    is_paused: bool = False

    def next_order(self) -> None:
        self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]

    def lines(self) -> list[RequestLine]:
        """The requests in the selected order; ended ones come last."""
        lines = list(self.sample.requests.lines) if self.sample else []
        if self.order == "rate":
            lines.sort(key=lambda line: -(line.tokens_per_second or 0.0))
        elif self.order == "progress":
            lines.sort(key=lambda line: -line.num_tokens / max(line.max_tokens, 1))
        return sorted(lines, key=lambda line: line.state == "ended")
