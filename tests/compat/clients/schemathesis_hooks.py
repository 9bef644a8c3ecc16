"""Keeps schemathesis from sending short deadlines: the correct reply, a 504, would be reported as a failure."""

from __future__ import annotations

from typing import Any

import schemathesis

DEADLINES = ("deadline_ms", "max_queue_ms")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Drop valid deadlines; keep those that must be refused."""
    if isinstance(case.body, dict):
        kept = {k: v for k, v in case.body.items() if k not in DEADLINES or not isinstance(v, (int, float)) or v <= 0}
        case.body = kept
