"""Variables of chat templates that requests set by fields of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from .errors import unsupported

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_EFFORT = re.compile(r"\breasoning_effort\b")


def thinking_variables(is_wanted: bool) -> dict[str, Any]:
    """Whether the model is to think, as templates call it."""
    return {"enable_thinking": is_wanted, "thinking": is_wanted}


def knows_effort(template: str) -> bool:
    """Whether it can be said how much the model is to think."""
    return _EFFORT.search(template) is not None


def effort_variables(level: Effort | None, template: str, *, param: str) -> dict[str, Any]:
    """How much the model is to think: ``none``, or another level that ``template`` knows of.

    Raises:
        ApiError: it knows of none.
    """
    if level is None:
        return {}
    variables = thinking_variables(False) if level == "none" else {}
    if knows_effort(template):
        return {**variables, "reasoning_effort": level}
    if not variables:
        text = f"{param} is {level!r}, which this model's chat template does not know: it has no reasoning_effort"
        raise unsupported(param, text)
    return variables


def template_variables(implied: Mapping[str, Any], said: Mapping[str, Any] | None) -> dict[str, Any]:
    """The option that carries both; what is said of a variable itself counts."""
    variables = {**implied, **(said or {})}
    return {"chat_template_kwargs": variables} if variables else {}
