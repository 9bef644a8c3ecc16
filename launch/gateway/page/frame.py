"""What the page shows at one moment, as plain values. Each frame is complete, so missing one does not matter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....driver.standing import RequestLine, RequestList
from ....protocol.messages import LEDGER_STAGES
from ...watch.figures import FIGURES
from ...watch.watched import Watched

COLUMNS = (
    "id", "state", "prompt_tokens", "tokens", "max_tokens", "cached_tokens", "preemptions", "age_s",
    "tokens_per_second", "slot", "stages_ms",
)  # fmt: skip


def frame(watched: Watched, shown: Mapping[str, Any], health: Mapping[str, Any], *, now_s: float) -> dict[str, Any]:
    """One event for the page. ``shown``: steps and pages as shown by execute; ``health``: the content of /health."""
    sample = watched.sample
    assert sample is not None, "a frame is made of a sample"
    silent_s = None if watched.silent_since_s is None else round(now_s - watched.silent_since_s, 1)
    return {
        "model": {name: watched.card.get(name) for name in ("model", "dtype", "device", "backend", "page_size")},
        "status": health["status"],
        "mode": health["mode"],
        "trouble": watched.trouble,
        "silent_s": silent_s,
        "restarts": watched.num_restarts,
        "panels": {role: _panel(role, watched, health) for role in FIGURES},
        "token_rates": [round(rate, 1) for rate in watched.token_rates],
        "stages": LEDGER_STAGES,
        "columns": COLUMNS,
        "requests": [_row(line, sample.requests) for line in sample.requests.lines],
        "left_out": sample.requests.num_left_out,
        "ended": [_row(line, sample.requests) for line in sample.requests.ended],
        "steps": shown.get("steps"),
        "pages": _pages(sample.stats["execute"], shown.get("pages")),
    }


def _panel(role: str, watched: Watched, health: Mapping[str, Any]) -> dict[str, Any]:
    assert watched.sample is not None, "a frame is made of a sample"
    stage = watched.sample.stats[role]
    return {
        "phase": stage["phase"],
        "life": stage["epoch"],
        "healthy": health["stages"][role]["healthy"],
        "figures": FIGURES[role](stage, watched) if watched.card else [],
    }


def _row(line: RequestLine, requests: RequestList) -> list[Any]:
    """In the order of ``COLUMNS``."""
    rate = line.tokens_per_second
    return [
        line.request_id,
        line.state,
        line.num_prompt_tokens,
        line.num_tokens,
        line.max_tokens,
        line.num_cached_tokens,
        line.num_preemptions,
        round(requests.age_s(line), 2),
        None if rate is None else round(rate, 1),
        line.slot,
        [round(ms, 1) for ms in line.stages_ms],
    ]


def _pages(execute: Mapping[str, Any], shown: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if shown is None:
        return None
    counts = {f"num_{name}": execute.get(f"pages_{name}", 0) for name in ("held", "limbo", "cached", "free")}
    return {**shown, **counts}
