"""Variables of chat templates that requests set through dedicated fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from ..errors import unsupported

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_EFFORT = re.compile(r"\breasoning_effort\b")
_SWITCH = re.compile(r"\benable_thinking\b|\bthinking is\b|\b(?:if|not|and|or) thinking\b")


def thinking_variables(is_wanted: bool) -> dict[str, Any]:
    """Turns reasoning on or off, by the names that templates use."""
    return {"enable_thinking": is_wanted, "thinking": is_wanted}


def knows_effort(template: str) -> bool:
    """Whether the template has a variable for the reasoning effort."""
    return _EFFORT.search(template) is not None


def effort_variables(level: Effort | None, template: str, *, param: str) -> dict[str, Any]:
    """The variables for a reasoning effort: ``none``, or a level that ``template`` supports, or on.

    Raises:
        ApiError: it supports none.
    """
    if level is None:
        return {}
    variables = thinking_variables(False) if level == "none" else {}
    if knows_effort(template):
        return {**variables, "reasoning_effort": level}
    if not variables and _SWITCH.search(template) is not None:
        return thinking_variables(True)
    if not variables:
        text = f"{param} is {level!r}, but this model's chat template has no reasoning_effort"
        raise unsupported(param, text)
    return variables


def template_variables(implied: Mapping[str, Any], said: Mapping[str, Any] | None) -> dict[str, Any]:
    """The option with both; variables set explicitly take precedence."""
    variables = {**implied, **(said or {})}
    return {"chat_template_kwargs": variables} if variables else {}
