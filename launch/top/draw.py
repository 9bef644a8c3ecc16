"""Bars and curves drawn with characters that can be told apart without colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.text import Text

LEVELS = "▁▂▃▄▅▆▇█"


class Part(NamedTuple):
    """A segment of a bar."""

    size: int
    character: str
    style: str


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values, scaled to the largest; blank where the value is zero."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    if top <= 0:
        return "".ljust(width)
    levels = (LEVELS[min(int(value / top * len(LEVELS)), len(LEVELS) - 1)] if value > 0 else " " for value in shown)
    return "".join(levels).rjust(width)


def bar(parts: Iterable[Part], width: int) -> Text:
    """The segments side by side, ``width`` characters in total; every non-empty one has at least one."""
    present = [part for part in parts if part.size > 0]
    total = sum(part.size for part in present)
    text, left, counted = Text(no_wrap=True), width, 0
    for index, part in enumerate(present):
        counted += part.size
        others = len(present) - index - 1
        end = round(width * counted / total)
        length = max(1, min(end - (width - left), left - others))
        text.append(part.character * length, part.style)
        left -= length
    text.append(" " * left)
    return text


def progress(done: int, total: int, width: int, style: str = "cyan") -> Text:
    """How much of a whole is done; the bar is empty only if nothing is."""
    length = max(round(width * min(done, total) / total), min(done, 1)) if total > 0 else 0
    return Text("█" * length, style, no_wrap=True) + Text("░" * (width - length), "dim")


def age(seconds: float) -> str:
    """A duration in few characters: 0.4s, 12s, 3m07."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    if seconds < 3600:
        return f"{int(seconds // 60)}m{int(seconds % 60):02}"
    return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02}"
