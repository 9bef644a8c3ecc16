"""JSON that is a single line for every reader: of a file, of server-sent events, of a log."""

from __future__ import annotations

import json
from typing import Any

# Line breaks for Unicode, and so for Python's ``splitlines``, that JSON does not escape.
_BREAKS = {character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


def json_line(row: dict[str, Any]) -> str:
    """The row, including its line break."""
    return in_one_line(json.dumps(row, ensure_ascii=False)) + "\n"


def why_not_json(error: ValueError | RecursionError) -> str:
    """Why a line could not be read. ``json`` names a line itself: of the text it was given, not of its file."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg.removesuffix(' at')} at character {error.pos}"
    return f"not JSON: {error}"


def in_one_line(encoded: str) -> str:
    """JSON without such characters. They only occur inside strings, where they may be escaped."""
    if not encoded.isascii():
        for character, escaped in _BREAKS.items():  # ``translate`` takes up to eighty times as long
            encoded = encoded.replace(character, escaped)
    return encoded
