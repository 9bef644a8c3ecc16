"""Calls that are objects with little between them: those of Llama, of the formats with marks, and those that a form
enforces.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

from .parser import Call, Found

_MAX_HEAD_CHARS = 256


class Scanner(Protocol):
    """Finds the ends of objects in a text that it reads once, piece by piece."""

    depth: int  # of the brackets that are open

    def ends(self, text: str) -> Iterator[int]:
        """Where objects end in this piece."""
        ...


class JsonScanner:
    def __init__(self) -> None:
        self.depth = 0
        self._in_string = self._is_escaped = False

    def ends(self, text: str) -> Iterator[int]:
        for mark in _MARKS.finditer(text, 1 if self._is_escaped else 0):
            match mark[0]:
                case '"' if self.depth > 0:
                    self._in_string = not self._in_string
                case "{" if not self._in_string:
                    self.depth += 1
                case "}" if not self._in_string:
                    self.depth -= 1
                    if self.depth <= 0:
                        yield mark.end()
        if text:
            ending = len(text) - len(text.rstrip("\\"))
            self._is_escaped = (ending - (self._is_escaped and ending == len(text))) % 2 == 1


_MARKS = re.compile(r'\\.|["{}]', re.DOTALL)  # an escaped character counts as a mark of its own


class ObjectsParser(ABC):
    """Each object is returned as a call once it is complete; an object that is no call begins the ``_rest``.

    The text is scanned once, for what may end an object, and an object is parsed only when it is complete.
    """

    between: str  # characters around objects

    def __init__(self) -> None:
        self._num_calls = 0
        self._is_over = False  # no more calls follow
        self._unread: list[str] = []  # pieces of text since the last call
        self._scanner = self._make_scanner()

    def _make_scanner(self) -> Scanner:
        return JsonScanner()

    @abstractmethod
    def _call_in(self, text: str) -> Call | None:
        """The call in the text up to the end of an object; None if it is none."""

    @abstractmethod
    def _rest(self, text: str) -> Found:
        """What to return of text that is not a call."""

    def push(self, text: str) -> Found:
        if self._is_over:
            return self._rest(text)
        found: Found = []
        begin = 0
        for end in self._scanner.ends(text):
            call = self._call_in("".join([*self._unread, text[begin:end]]))
            if call is None:
                return [*found, *self._end(text[begin:])]
            found.append(call)
            self._num_calls += 1
            self._unread, begin = [], end
        self._unread.append(text[begin:])
        return found

    @property
    def is_holding(self) -> bool:
        return self._scanner.depth > 0 or bool(self._rest("".join(self._unread)))

    def flush(self) -> Found:
        return self._end("")

    def _end(self, text: str) -> Found:
        """The calls end before the unread text and this one."""
        rest = self._rest("".join([*self._unread, text]))
        self._is_over, self._unread, self._scanner = True, [], self._make_scanner()
        return rest

    def _has_text(self, text: str) -> bool:
        """Whether there is more in ``text`` than what may follow a call."""
        is_behind_call = self._num_calls and not self._is_over
        return bool(text.strip(self.between) if is_behind_call else text)


class BareParser(ObjectsParser):
    """Without a mark in front of it, an answer that begins like a call is held back until the call is complete; any
    other is text.
    """

    def __init__(self) -> None:
        super().__init__()
        self._head = ""

    @abstractmethod
    def _may_begin(self, begun: str) -> bool:
        """Whether an answer that begins with this text, without white space before it, may be a call."""

    def push(self, text: str) -> Found:
        if len(self._head) < _MAX_HEAD_CHARS and not self._is_over:
            self._head = (self._head + text)[:_MAX_HEAD_CHARS]
            if not self._may_begin(self._head.lstrip()):
                return self._end(text)
        return super().push(text)
