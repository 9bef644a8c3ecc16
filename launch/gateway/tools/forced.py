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
    """The whole answer is a list of calls, each of which counts as soon as it is complete; half of one does not."""

    def __init__(self) -> None:
        self._text = ""
        self._num_calls = 0
        self._decoder = json.JSONDecoder()

    def push(self, text: str) -> Found:
        self._text += text
        found: Found = []
        while True:
            rest = self._text.lstrip(_BETWEEN)
            try:
                value, end = self._decoder.raw_decode(rest)
            except ValueError:
                return found
            if (call := call_of(value)) is None:
                return found
            found.append(call)
            self._num_calls += 1
            self._text = rest[end:]

    def flush(self) -> Found:
        return [] if self._num_calls or not self._text else [self._text]


_BETWEEN = " \t\r\n[,]"
