"""``{"name": ..., "parameters": {...}}``, separated by semicolons, possibly after ``<|python_tag|>``: Llama 3."""

from __future__ import annotations

import json
from typing import Any

from .parser import UNREADABLE, Call, Found, call_of

TAG = "<|python_tag|>"
_HEAD, _MAX_HEAD_CHARS = '{"name":"', 256  # without and with white space


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
        if self._may_be_call(begun) or TAG.startswith(begun[: len(TAG)]):
            return []
        self._is_text, rest = True, self._text
        return [rest]

    @property
    def is_holding(self) -> bool:
        return not self._is_text and bool(self._text)

    def flush(self) -> Found:
        if self._is_text or not self._text:
            return []
        return self._read(self._text.strip().removeprefix(TAG)) or [self._text]

    def _may_be_call(self, begun: str) -> bool:
        return begun.startswith("{")

    def call_of(self, value: Any) -> Call | None:
        return call_of(value)

    def _read(self, text: str) -> Found:
        """The calls; none if there is anything else."""
        decoder, found = json.JSONDecoder(), []
        text = text.strip()
        while text:
            try:
                value, end = decoder.raw_decode(text)
                call = self.call_of(value)
            except UNREADABLE:
                return []
            if call is None:
                return []
            found.append(call)
            text = text[end:].lstrip().removeprefix(";").lstrip()
        return list(found)


class FormLlamaParser(LlamaParser):
    """For an answer that is either JSON of another form or calls, which consist of exactly a name and parameters."""

    def _may_be_call(self, begun: str) -> bool:
        compact = "".join(begun[:_MAX_HEAD_CHARS].split())
        return _HEAD.startswith(compact[: len(_HEAD)])

    def call_of(self, value: Any) -> Call | None:
        is_call = isinstance(value, dict) and value.keys() == {"name", "parameters"}
        return super().call_of(value) if is_call else None
