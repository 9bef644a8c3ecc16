"""Fields of settings, and the checks of their values. Each error names its field."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

from .errors import ConfigError


def option(default: Any, text: str, *, secret: bool = False) -> Any:
    """A field with a description; ``launch`` derives a flag of the same name, with ``text`` as its help."""
    return field(default=default, metadata={"help": text}, repr=not secret)


def require(condition: bool, name: str, text: str) -> None:
    if not condition:
        raise ConfigError(f"{name} {text}", param=name)


def between(name: str, value: float | None, low: float, high: float = math.inf) -> None:
    """None, an option that was not given, has no limits; NaN is within none."""
    limits = f"the least is {low}" if high == math.inf else f"the limits are {low} and {high}"
    require(value is None or low <= value <= high, name, f"is {value}, {limits}")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    require(value in known, name, f"is {value!r}, known are: {', '.join(known)}")
