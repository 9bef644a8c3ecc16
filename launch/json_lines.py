"""JSON that is one line to every reader: of a file, of server-sent events, of a log."""

from __future__ import annotations

import json
from typing import Any

# What Unicode calls a line break and JSON does not escape. Python's ``splitlines``, for one, splits there.
_BREAKS = str.maketrans({character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"})


def json_line(row: dict[str, Any]) -> str:
    """The row with its end of line."""
    return in_one_line(json.dumps(row, ensure_ascii=False)) + "\n"


def in_one_line(encoded: str) -> str:
    """JSON without such characters. Only its strings have them, and in these they may be escaped."""
    return encoded if encoded.isascii() else encoded.translate(_BREAKS)
