"""What an unknown name was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LENGTH = 40  # of names that are compared: the comparison takes longer than linear time


def did_you_mean(name: object, known: Iterable[str], *, prefix: str = "") -> str:
    """The end of an error about ``name``: which of the ``known`` it resembles most; empty if it resembles none.

    ``prefix``: what all of these names begin with, left out here: it would make them alike.
    """
    if not isinstance(name, str) or len(name) > MAX_LENGTH:
        return ""
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""
