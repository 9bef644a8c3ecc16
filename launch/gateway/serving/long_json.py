"""JSON of long replies, encoded part by part: one call holds the interpreter's lock, also in a thread, and so up every
stream of the process, for a fifth of a second if there are 20 alternatives for each of 8,192 tokens or two million ids.
"""

from __future__ import annotations

from typing import Any

from ..errors import json_bytes

FEW = 64  # entries that are encoded together
MANY = 1 << 13  # the same for numbers and texts, which take a millisecond


def long_json(content: Any) -> bytes:
    """What ``json_bytes`` returns."""
    if not _is_long(content):
        return json_bytes(content)
    if isinstance(content, dict):
        return b"{%b}" % b",".join(b"%b:%b" % (json_bytes(name), long_json(item)) for name, item in content.items())
    if isinstance(content[-1], dict | list):
        return b"[%b]" % b",".join(map(long_json, content))
    parts = (content[start : start + MANY] for start in range(0, len(content), MANY))
    return b"[%b]" % b",".join(json_bytes(part)[1:-1] for part in parts)


def _is_long(content: Any) -> bool:
    """Whether there is a list of more than ``FEW`` maps or lists in it, or of more than ``MANY`` numbers or texts."""
    if isinstance(content, dict):
        return any(map(_is_long, content.values()))
    if not isinstance(content, list) or not content:
        return False
    if not isinstance(content[-1], dict | list):
        return len(content) > MANY
    return len(content) > FEW or any(map(_is_long, content))
