"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5, Qwen 3 and relatives."""

from __future__ import annotations

import json

from .parser import UNREADABLE, Found, call_of, held_back

START, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """Text up to a start tag is text; what lies between the tags is a call."""

    def __init__(self) -> None:
        self._text = ""
        self._inside = False

    def push(self, text: str) -> Found:
        self._text += text
        found: Found = []
        while True:
            marker = END if self._inside else START
            before, tag, after = self._text.partition(marker)
            if not tag:
                break
            found += _read(before) if self._inside else _visible(before)
            self._text, self._inside = after, not self._inside
        if not self._inside:
            keep = held_back(self._text, START)
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
        return _read(rest, closing="") if self._inside else [rest]


def _visible(text: str) -> Found:
    return [text] if text else []


def _read(text: str, *, closing: str = END) -> Found:
    """The call between two tags; what is no call goes back to the text with its tags."""
    try:
        call = call_of(json.loads(text))
    except UNREADABLE:
        call = None
    return [call] if call is not None else [f"{START}{text}{closing}"]
