"""Runs the checks of the scripts beside this one: each check is a function, and a failed one stops no other."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

QUESTION = "What does len do?"
ANSWER = "Return the number of items in a container."  # of the model demo, at temperature 0
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "the weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def run(title: str, checks: Sequence[Callable[..., None]], *context: Any) -> None:
    """Print a line per check and a last one with the counts; exit with 1 if one failed."""
    num_failed = 0
    for check in checks:
        try:
            check(*context)
        except Exception as error:
            num_failed += 1
            print(f"FAIL {check.__name__}: {type(error).__name__}: {error}")
            traceback.print_exc()
        else:
            print(f"ok   {check.__name__}")
    print(f"{title}: {len(checks) - num_failed} passed, {num_failed} failed")
    sys.exit(num_failed > 0)


def raises(kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> Any:
    """The exception of this type that ``call`` raises."""
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind} was raised, but {result!r:.200} returned")
