"""A step trace (``--trace FILE``) as it lies in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.errors import ConfigError


class Line(NamedTuple):
    """One line, and where it stands."""

    number: int  # from 1
    values: dict[str, Any]


def is_trace(path: Path) -> bool:
    """Whether the first line that is not blank is a trace's. A file of arrivals has none of its names."""
    first = next(iter(read_json_lines(path)), None)
    return first is not None and "trace" in first.values


def read_json_lines(path: Path) -> Iterator[Line]:
    """Every line that is not blank.

    A line that was being written when its process was killed is passed over: the next one begins a new life.

    Raises:
        ConfigError: the file cannot be read, or a line is no JSON object.
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
        raise ConfigError(f"cannot read {path}: {error}", param="file") from error
    if cut is not None and text.endswith("\n"):
        raise cut


def malformed(path: Path, number: int, error: Exception) -> ConfigError:
    """What to say of a line that lacks something, or has a value that cannot be."""
    what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return ConfigError(f"{path}, line {number}: {what}", param="file")


def _parse(text: str) -> dict[str, Any] | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _no_object(path: Path, number: int) -> ConfigError:
    return ConfigError(f"{path}, line {number}: not a JSON object", param="file")
