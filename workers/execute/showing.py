"""The latest steps and the page pool, for viewers; computed only while there are any."""

from __future__ import annotations

import time
from typing import Any

from ...protocol.view import View
from .engine import Engine
from .scheduling.page_map import map_pages

INTERVAL_S = 0.5
NUM_STEPS = 120  # shown of the history


class Showing:
    """Called between steps."""

    def __init__(self, view: View, engine: Engine) -> None:
        self._view = view
        self._engine = engine
        self._next = 0.0

    def show_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL_S
        if self._view.is_watched:
            self._view.show({"steps": self._steps(), "pages": map_pages(self._engine.scheduler)._asdict()})

    def _steps(self) -> dict[str, Any]:
        """Columns of the latest steps, the newest last."""
        steps = self._engine.history.last(NUM_STEPS)
        return {
            "last": steps[-1].step if steps else 0,
            "ms": [round(step.elapsed_ns / 1e6, 3) for step in steps],
            "prefill_tokens": [step.num_prefill_tokens for step in steps],
            "decodes": [step.num_decodes for step in steps],
            "preempted": [step.num_preempted for step in steps],
        }
