"""A trace of the steps, one JSON line each: enough to see who ran when, with whom, and what it cost."""

from __future__ import annotations

import json
from typing import Any, Protocol

from .engine import StepOutputs


class Writable(Protocol):
    """What a trace is written to."""

    def write(self, text: str, /) -> object: ...


class StepTrace:
    """Writes lines such as ``{"step": 7, "launched_ns": 1, "ms": 2.5, "decodes": [0, 3], "prefills": [[4, 0, 512]]}``.

    Sequences are named by their slot in the journal. What did not happen in a step is left out of its line.
    """

    def __init__(self, file: Writable) -> None:
        self._file = file

    def write(self, outputs: StepOutputs) -> None:
        self._file.write(json.dumps(trace_line(outputs), separators=(",", ":")) + "\n")


def trace_line(outputs: StepOutputs) -> dict[str, Any]:
    """One step as plain values."""
    plan, progress, stats = outputs.plan, outputs.progress, outputs.stats
    happened = {
        "decodes": [chunk.key[0] for chunk in plan.chunks[: plan.num_decodes]],
        "prefills": [[chunk.key[0], chunk.start, chunk.num_tokens] for chunk in plan.chunks[plan.num_decodes :]],
        "starts": [[key[0], num_cached_tokens] for key, num_cached_tokens in plan.starts],
        "preempted": [key[0] for key in plan.preempted],
        "swap_out": plan.moves.swap_out,
        "copies": plan.moves.copies,
        "swap_in": plan.moves.swap_in,
        "finished": {key[0]: reason for key, reason in progress.finished.items()},
        "expired": {key[0]: why for key, why in progress.expired.items()},
        "failed": {key[0]: why for key, why in progress.failed.items()},
    }
    return {
        "step": plan.step,
        "launched_ns": outputs.launched_at,
        "ms": round((outputs.collected_at - outputs.launched_at) / 1e6, 4),
        **{name: value for name, value in happened.items() if value},
        "waiting": stats.num_waiting,
        "pages_free": stats.num_free_pages,
        "pages_cached": stats.num_idle_pages,
    }
