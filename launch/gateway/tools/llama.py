"""``{"name": ..., "parameters": {...}}``, separated by semicolons, possibly after ``<|python_tag|>``: Llama 3."""

from __future__ import annotations

import json
from typing import Any

from .objects import BareParser
from .parser import UNREADABLE, Call, Found, Schemas, call_of

TAG = "<|python_tag|>"
_HEAD = '{"name":"'  # without white space


class LlamaParser(BareParser):
    between = " \t\r\n;"

    def _may_begin(self, begun: str) -> bool:
        return self._may_be_call(begun) or TAG.startswith(begun[: len(TAG)])

    def _may_be_call(self, begun: str) -> bool:
        return begun.startswith("{")

    def _is_call(self, value: Any) -> bool:
        return isinstance(value, dict) and not value.keys().isdisjoint(("parameters", "arguments"))

    def _call_in(self, text: str) -> Call | None:
        try:
            value = json.loads(text.strip(self.between).removeprefix(TAG))
            return call_of(value) if self._is_call(value) else None
        except UNREADABLE:
            return None

    def _rest(self, text: str) -> Found:
        return [text] if self._has_text(text) else []


class FormLlamaParser(LlamaParser):
    """For an answer that is either JSON of another form or calls, which consist of exactly a name and parameters."""

    def __init__(self, tools: Schemas | None = None) -> None:
        """``tools``: if they are known."""
        super().__init__()
        self._tools = tools

    def _may_be_call(self, begun: str) -> bool:
        compact = "".join(begun.split())
        return _HEAD.startswith(compact[: len(_HEAD)])

    def _is_call(self, value: Any) -> bool:
        if not isinstance(value, dict) or value.keys() != {"name", "parameters"}:
            return False
        name = value["name"]
        return self._tools is None or (isinstance(name, str) and name in self._tools)
