"""The id of an answer, and the information it carries for resuming."""

from __future__ import annotations

import re
import uuid
from typing import NamedTuple

_LAST = re.compile("([0-9]{0,2})([tobhTOBH]?)")  # joined to keep ids short


class AnswerId(NamedTuple):
    """The part before the hyphen: ``chatcmpl.hermes.3t-job7`` is a chat with three choices, reasoning and Hermes tool
    calls.
    """

    kind: str  # "chatcmpl", "cmpl" or "resp"
    parser: str  # of its tool calls; empty: it has none
    num_choices: int
    thoughts: str  # "t": precede the answer; "o", "b": opened or begun by the prompt; capital: hidden; empty: not split


def new_id(kind: str, given: str | None = None, *, num_choices: int = 1, thoughts: str = "") -> str:
    """``kind`` may be followed by a dot and the tool parser."""
    last = f"{num_choices if num_choices > 1 else ''}{thoughts}"
    return f"{kind}{last and '.'}{last}-{given or uuid.uuid4().hex}"


def read_id(request_id: str) -> AnswerId:
    """The information in an id; an id that is not ours yields the defaults."""
    kind, *parts = request_id.partition("-")[0].split(".")
    parser, num_choices, thoughts = "", 1, ""
    for part in parts:
        if last := _LAST.fullmatch(part):
            num_choices, thoughts = max(1, int(last[1] or 1)), last[2]
        elif not part[:1].isdigit():
            parser = parser or part
    return AnswerId(kind, parser, num_choices, thoughts)
