"""The id of an answer, and what it says of it to whoever takes it up again."""

from __future__ import annotations

import uuid
from typing import NamedTuple


class AnswerId(NamedTuple):
    """What stands before the hyphen: ``chatcmpl.hermes.3-job7`` is a chat of three choices with Hermes' calls."""

    kind: str  # "chatcmpl", "cmpl" or "resp"
    parser: str  # of the calls of tools in it; empty: there are none to look for
    num_choices: int


def new_id(kind: str, given: str | None = None, *, num_choices: int = 1) -> str:
    """``kind`` may have the tool parser behind it, after a point."""
    several = f".{num_choices}" if num_choices > 1 else ""
    return f"{kind}{several}-{given or uuid.uuid4().hex}"


def read_id(request_id: str) -> AnswerId:
    """What an id says; one that is not ours says nothing of use."""
    kind, *parts = request_id.partition("-")[0].split(".")
    counts = [int(part) for part in parts if len(part) <= 2 and part.isascii() and part.isdecimal()]
    return AnswerId(kind, next((part for part in parts if not part[:1].isdigit()), ""), max([1, *counts]))
