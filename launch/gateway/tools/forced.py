"""Tool calls enforced by the form of the answer: it consists of the arguments of one call, or of a list of calls."""

from __future__ import annotations

import json

from .objects import ObjectsParser
from .parser import UNREADABLE, Call, Found, call_of


class ArgumentsParser:
    """The whole answer is the arguments of one tool, as JSON text."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ""

    def push(self, text: str) -> Found:
        self._text += text
        return []

    @property
    def is_holding(self) -> bool:
        return bool(self._text)

    def flush(self) -> Found:
        return [Call(self._name, self._text)]


class ListParser(ObjectsParser):
    """The whole answer is a list of calls; an incomplete one is dropped."""

    between = " \t\r\n[,]"

    def _call_in(self, text: str) -> Call | None:
        try:
            return call_of(json.loads(text.lstrip(self.between)))
        except UNREADABLE:
            return None

    def _rest(self, text: str) -> Found:
        return [text] if text and not self._num_calls else []
