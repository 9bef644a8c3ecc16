"""The tags around the reasoning that some models write before their answer."""

from __future__ import annotations

from typing import NamedTuple

START, END = "<think>", "</think>"


class ReasoningTokens(NamedTuple):
    """The ids of the two tags, and whether the prompt ends inside the reasoning, so that the answer begins with it."""

    start: int
    end: int
    is_open: bool
