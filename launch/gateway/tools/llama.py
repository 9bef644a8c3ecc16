"""``{"name": ..., "parameters": {...}}``, separated by semicolons, possibly after ``<|python_tag|>``: Llama 3."""

from __future__ import annotations

import json

from .parser import UNREADABLE, Found, call_of

TAG = "<|python_tag|>"


class LlamaParser:
    """An answer that begins like a call is held back until its end; any other is text."""

    def __init__(self) -> None:
        self._text = ""
        self._is_text = False

    def push(self, text: str) -> Found:
        if self._is_text:
            return [text] if text else []
        self._text += text
        begun = self._text.lstrip()
        if begun.startswith("{") or TAG.startswith(begun[: len(TAG)]):
            return []
        self._is_text, rest = True, self._text
        return [rest]

    @property
    def is_holding(self) -> bool:
        return not self._is_text and bool(self._text)

    def flush(self) -> Found:
        if self._is_text or not self._text:
            return []
        return _read(self._text.strip().removeprefix(TAG)) or [self._text]


def _read(text: str) -> Found:
    """The calls; none if there is anything else."""
    decoder, found = json.JSONDecoder(), []
    text = text.strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
            call = call_of(value)
        except UNREADABLE:
            return []
        if call is None:
            return []
        found.append(call)
        text = text[end:].lstrip().removeprefix(";").lstrip()
    return list(found)
