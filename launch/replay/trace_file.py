"""Reads step traces (``--trace FILE``)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.errors import ConfigError


class Line(NamedTuple):
    """A line and its number."""

    number: int  # from 1
    values: dict[str, Any]


def is_trace(path: Path) -> bool:
    """Whether the first non-blank line is that of a trace. A file of arrivals has different fields."""
    first = next(iter(read_json_lines(path)), None)
    return first is not None and "trace" in first.values


def read_json_lines(path: Path) -> Iterator[Line]:
    """Every non-blank line.

    A line that was being written when its process was killed is skipped, if the process was restarted after it.

    Raises:
        ConfigError: the file cannot be read, or a line is not a JSON object.
    """
    cut: ConfigError | None = None
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                values = _parse(text)
                if cut is not None and not (values and "trace" in values):
                    raise cut
                cut = None if values is not None else _no_object(path, number)
                if values is not None:
                    yield Line(number, values)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {path}: {reason}", param="file") from error
    if cut is not None and text.endswith("\n"):
        raise cut


def malformed(path: Path, number: int, error: Exception) -> ConfigError:
    """The error for a line with a missing or impossible value."""
    what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return ConfigError(f"{path}, line {number}: {what}", param="file")


def _parse(text: str) -> dict[str, Any] | None:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _no_object(path: Path, number: int) -> ConfigError:
    return ConfigError(f"{path}, line {number}: not a JSON object", param="file")
