"""The id of an answer, and what it says of it to whoever takes it up again."""

from __future__ import annotations

import re
import uuid
from typing import NamedTuple

_LAST = re.compile("([0-9]{0,2})([tobhTOBH]?)")  # together, since ids have a limit


class AnswerId(NamedTuple):
    """What stands before the hyphen: ``chatcmpl.hermes.3t-job7`` is a chat of three choices with thoughts and Hermes'
    calls.
    """

    kind: str  # "chatcmpl", "cmpl" or "resp"
    parser: str  # of the calls of tools in it; empty: there are none to look for
    num_choices: int
    thoughts: str  # "t": before the answer; "o", "b": opened, begun by the prompt; capitals: left out; empty: no matter


def new_id(kind: str, given: str | None = None, *, num_choices: int = 1, thoughts: str = "") -> str:
    """``kind`` may have the tool parser behind it, after a point."""
    last = f"{num_choices if num_choices > 1 else ''}{thoughts}"
    return f"{kind}{last and '.'}{last}-{given or uuid.uuid4().hex}"


def read_id(request_id: str) -> AnswerId:
    """What an id says; one that is not ours says nothing of use."""
    kind, *parts = request_id.partition("-")[0].split(".")
    parser, num_choices, thoughts = "", 1, ""
    for part in parts:
        if last := _LAST.fullmatch(part):
            num_choices, thoughts = max(1, int(last[1] or 1)), last[2]
        elif not part[:1].isdigit():
            parser = parser or part
    return AnswerId(kind, parser, num_choices, thoughts)
