"""The tables of docs/configuration.md: every field of a configuration, with its default and limits."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from ...protocol.config import PipelineConfig
from ...protocol.errors import ConfigError
from ..gateway.config import GatewayConfig
from .api import about

IMPOSSIBLE: dict[type, Any] = {int: -(10**30), float: -1e30, str: "?"}
_SAID = re.compile(r"(?:the limits are |a power of two from |known are: |the forms are |(?=the least is ))(.*)")


def settings() -> str:
    """Markdown: one section per group of settings."""
    return "\n".join(line for name, part in groups().items() for line in _section(name, part))


def groups() -> dict[str, Any]:
    """The groups of settings by the titles of their sections, which are also those of their flags."""
    parts = {name.capitalize(): part for name, part in get_type_hints(PipelineConfig).items()}
    return {**parts, "HTTP": GatewayConfig}


def _section(name: str, part: Any) -> Iterator[str]:
    yield from (f"## {name}", "", about(part), "")
    yield "| field | default | limits | |"
    yield "|---|---|---|---|"
    hints = get_type_hints(part)
    for item in dataclasses.fields(part):
        said = limits(part, item.name, hints[item.name])
        text = _without(item.metadata["help"], said).replace("|", "\\|")
        yield f"| `{item.name}` | `{item.default!r}` | {said} | {text} |"
    yield ""


def _without(text: str, choices: str) -> str:
    """The help text of a flag without its choices, which have a column of their own."""
    if not choices or choices not in text:
        return text
    before, _, after = text.partition(choices)
    return "; ".join(filter(None, (before.removesuffix(": "), after.lstrip(":; "))))


def limits(part: Any, name: str, hint: Any) -> str:
    """Taken from the error message for an impossible value: so the limits are written only where they are checked."""
    for kind in get_args(hint) or (hint,):
        if kind in IMPOSSIBLE:
            try:
                part(**{name: IMPOSSIBLE[kind]})
            except ConfigError as error:
                said = _SAID.search(error.message)
                return _short(said[1]) if said else ""
    return ""


def _short(said: str) -> str:
    said = re.sub(r"(\d)\.0\b", r"\1", said)
    if said.startswith("the least is "):
        return f"from {said.removeprefix('the least is ')}"
    return said.replace(" and ", " to " if said[-1].isdigit() else " or ")
