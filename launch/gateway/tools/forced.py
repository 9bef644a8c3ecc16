"""Tool calls enforced by the form of the answer: it consists of the arguments of one call, or of a list of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

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


class ListParser:
    """The whole answer is a list of calls, each returned once it is complete; an incomplete one is dropped.

    The text is scanned once, for braces that may end a call, and a call is parsed only when it is complete.
    """

    def __init__(self) -> None:
        self._unread: list[str] = []  # pieces of text since the last call
        self._depth = 0  # of braces
        self._in_string = self._is_escaped = False
        self._num_calls = 0
        self._is_list = True  # so far

    def push(self, text: str) -> Found:
        found: Found = []
        begin = 0
        for end in self._ends(text) if self._is_list else ():
            whole = "".join([*self._unread, text[begin:end]])
            call = _read(whole.lstrip(_BETWEEN))
            if call is None:
                self._is_list = False
                break
            found.append(call)
            self._num_calls += 1
            self._unread, begin = [], end
        self._unread.append(text[begin:])
        return found

    @property
    def is_holding(self) -> bool:
        return self._depth > 0 or (not self._num_calls and any(self._unread))

    def flush(self) -> Found:
        text = "".join(self._unread)
        return [] if self._num_calls or not text else [text]

    def _ends(self, text: str) -> Iterator[int]:
        """Where objects of the list end in this piece."""
        for mark in _MARKS.finditer(text, 1 if self._is_escaped else 0):
            match mark[0]:
                case '"':
                    self._in_string = not self._in_string
                case "{" if not self._in_string:
                    self._depth += 1
                case "}" if not self._in_string:
                    self._depth -= 1
                    if self._depth <= 0:
                        yield mark.end()
        if text:
            ending = len(text) - len(text.rstrip("\\"))
            self._is_escaped = (ending - (self._is_escaped and ending == len(text))) % 2 == 1


def _read(text: str) -> Call | None:
    try:
        return call_of(json.loads(text))
    except UNREADABLE:
        return None


_BETWEEN = " \t\r\n[,]"
_MARKS = re.compile(r'\\.|["{}]', re.DOTALL)  # an escaped character counts as a mark of its own
