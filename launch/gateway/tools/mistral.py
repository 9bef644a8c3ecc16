"""``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and the later ``[TOOL_CALLS]name[ARGS]{...}``: Mistral.

In between, as in Mistral Small 3.2, an id followed the name: ``[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}``.
"""

from __future__ import annotations

import json

from .objects import ObjectsParser
from .parser import UNREADABLE, Call, Found, arguments_text, call_of, held_back

MARKER, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser:
    """What precedes the marker is text; everything after it is calls."""

    def __init__(self) -> None:
        self._text = ""
        self._calls: _Calls | None = None

    def push(self, text: str) -> Found:
        if self._calls is not None:
            return self._calls.push(text)
        self._text += text
        before, marker, after = self._text.partition(MARKER)
        if marker:
            self._text, self._calls = "", _Calls()
            return [*([before] if before else ()), *self._calls.push(after)]
        keep = held_back(self._text, MARKER)
        visible, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return [visible] if visible else []

    @property
    def is_holding(self) -> bool:
        return bool(self._text) if self._calls is None else self._calls.is_holding

    def flush(self) -> Found:
        if self._calls is not None:
            return self._calls.flush()
        rest, self._text = self._text, ""
        return [rest] if rest else []


class _Calls(ObjectsParser):
    """Calls from a JSON list, or as a name and an object each, with or without a marker in between."""

    between = " \t\r\n[,]"

    @property
    def is_holding(self) -> bool:
        is_marker_held = not self._num_calls and not self._is_over
        return is_marker_held or super().is_holding

    def _call_in(self, text: str) -> Call | None:
        try:
            text = text.strip().removeprefix(MARKER).lstrip()
            if text.startswith(("[", ",", "{")):
                return call_of(json.loads(text.lstrip(self.between)))
            name, brace, arguments = text.partition("{")
            name = name.removesuffix(ARGS).partition(CALL_ID)[0].strip()
            return Call(name, arguments_text(json.loads(brace + arguments))) if name and "[" not in name else None
        except UNREADABLE:
            return None

    def _rest(self, text: str) -> Found:
        if not self._num_calls and not self._is_over:
            text = MARKER + text
        return [text] if self._has_text(text) else []
