"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5, Qwen 3 and relatives."""

from __future__ import annotations

import json

from .parser import UNREADABLE, Call, Found, call_of, held_back


class HermesParser:
    """What precedes a start tag is text; what lies between the tags is a call."""

    start, end = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._text = ""
        self._inside = False

    def push(self, text: str) -> Found:
        self._text += text
        found: Found = []
        while True:
            marker = self.end if self._inside else self.start
            before, tag, after = self._text.partition(marker)
            if not tag:
                break
            found += self._read(before, self.end) if self._inside else _visible(before)
            self._text, self._inside = after, not self._inside
        if not self._inside:
            keep = held_back(self._text, self.start)
            visible, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
            found += _visible(visible)
        return found

    @property
    def is_holding(self) -> bool:
        return self._inside or bool(self._text)

    def flush(self) -> Found:
        rest, self._text = self._text, ""
        if not rest:
            return []
        return self._read(rest, "") if self._inside else [rest]

    def call_in(self, text: str) -> Call | None:
        """The call between two tags; None if it cannot be parsed."""
        try:
            return call_of(json.loads(text))
        except UNREADABLE:
            return None

    def _read(self, text: str, closing: str) -> Found:
        """A call, or its text including the tags if it cannot be parsed."""
        call = self.call_in(text)
        return [call] if call is not None else [f"{self.start}{text}{closing}"]


def _visible(text: str) -> Found:
    return [text] if text else []
