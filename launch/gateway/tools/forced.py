"""Calls that the form of the answer leaves no way around: the answer is the arguments of one, or a list of calls."""

from __future__ import annotations

import json

from .parser import Call, Found, call_of


class ArgumentsParser:
    """The whole answer is the arguments of one tool, as JSON text."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ""

    def push(self, text: str) -> Found:
        self._text += text
        return []

    def flush(self) -> Found:
        return [Call(self._name, self._text)]


class ListParser:
    """The whole answer is a list of calls. One that was cut short is text."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> Found:
        self._text += text
        return []

    def flush(self) -> Found:
        try:
            values = json.loads(self._text)
        except ValueError:
            return [self._text] if self._text else []
        calls = [call_of(value) for value in values] if isinstance(values, list) else []
        return [call for call in calls if call is not None] or [self._text]
