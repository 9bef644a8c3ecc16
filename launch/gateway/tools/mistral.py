"""``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and the later ``[TOOL_CALLS]name[ARGS]{...}``: Mistral.

In between, as in Mistral Small 3.2, an id followed the name: ``[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}``.
"""

from __future__ import annotations

import json

from .parser import UNREADABLE, Call, Found, arguments_text, call_of, held_back

MARKER, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser:
    """What precedes the marker is text; everything after it is calls."""

    def __init__(self) -> None:
        self._text = ""
        self._inside = False

    def push(self, text: str) -> Found:
        self._text += text
        if self._inside:
            return []
        before, marker, after = self._text.partition(MARKER)
        if marker:
            self._text, self._inside = after, True
            return [before] if before else []
        keep = held_back(self._text, MARKER)
        visible, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return [visible] if visible else []

    @property
    def is_holding(self) -> bool:
        return self._inside or bool(self._text)

    def flush(self) -> Found:
        rest, self._text = self._text, ""
        if not self._inside:
            return [rest] if rest else []
        calls = _read_list(rest) or _read_named(rest)
        return calls or [MARKER + rest]


def _read_list(text: str) -> Found:
    """Calls from a JSON list; none if it is not one."""
    try:
        values, _ = json.JSONDecoder().raw_decode(text.lstrip())
        calls = [call_of(value) for value in values] if isinstance(values, list) else []
    except UNREADABLE:
        return []
    return [call for call in calls if call is not None] if all(calls) else []


def _read_named(text: str) -> Found:
    """Calls as a name and an object each, with or without a marker in between."""
    found: Found = []
    while text:  # not split at markers: an argument may contain one
        name, brace, rest = text.partition("{")
        name = name.removesuffix(ARGS).partition(CALL_ID)[0].strip()
        try:
            arguments, end = json.JSONDecoder().raw_decode(brace + rest)
            call = Call(name, arguments_text(arguments))
        except UNREADABLE:
            return []
        text = (brace + rest)[end:].strip()
        if not name or "[" in name or (text and not text.startswith(MARKER)):
            return []
        text = text.removeprefix(MARKER)
        found.append(call)
    return found
