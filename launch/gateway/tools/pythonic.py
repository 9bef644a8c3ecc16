"""``name(key='value', days=3)``: calls in Python's syntax, with JSON's names of constants as well."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from .parser import Call, arguments_text, call_of

# Templates put texts between quotes as they are, so models write quotes within them that nothing escapes. What follows
# a quote tells whether it ends the text.
_BEHIND_TEXT = r"\s*[,)\]}:]"
_MARKS = re.compile(r"\\.|[\\'\"()\[\]{}]", re.DOTALL)
_ENDS_TEXT, _UNDECIDED = re.compile(_BEHIND_TEXT), re.compile(r"\s*\Z")

_HEAD = re.compile(r"([\w.:-]{1,128})\s*\(\s*")
_KEY = re.compile(r"([\w-]{1,128})\s*=\s*")
_COMMA = re.compile(r"\s*,\s*")
_TEXT = re.compile(rf"(['\"])((?:\\.|(?!\1{_BEHIND_TEXT}).)*)\1\s*", re.DOTALL)
_WORD = re.compile(r"([\w.+-]+)\s*")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{each: each for each in "\\'\"/"}}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class PythonicScanner:
    """Finds the brackets that end calls. Outside of calls, only the bracket that begins one counts."""

    def __init__(self) -> None:
        self.depth = 0
        self._quote = ""  # of the text that is open
        self._tail = ""  # end of the last piece, whose meaning the next one tells

    def ends(self, text: str) -> Iterator[int]:
        num_before, text, self._tail = len(self._tail), self._tail + text, ""
        for mark in _MARKS.finditer(text):
            match mark[0]:
                case "\\":  # of half an escaped character
                    self._tail = "\\"
                case "'" | '"' as quote if self._quote:
                    if quote == self._quote and self._is_end(text, mark.end()):
                        self._quote = ""
                    elif self._tail:
                        return
                case _ if self._quote or mark[0][0] == "\\":
                    pass
                case "'" | '"' as quote if self.depth > 0:
                    self._quote = quote
                case "(" | "{":
                    self.depth += 1
                case "[" if self.depth > 0:
                    self.depth += 1
                case ")" | "]" | "}" if self.depth > 0:
                    self.depth -= 1
                    if self.depth == 0:
                        yield mark.end() - num_before

    def _is_end(self, text: str, place: int) -> bool:
        """Whether the quote in front of this place ends the text; without the next character it becomes the tail."""
        if _UNDECIDED.match(text, place):
            self._tail = text[place - 1 :]
            return False
        return _ENDS_TEXT.match(text, place) is not None


def pythonic_call(text: str) -> Call | None:
    """
    Raises:
        ValueError, RecursionError: it cannot be read.
    """
    if text.startswith("{"):  # some models write JSON if they are told to
        return call_of(json.loads(text))
    if (head := _HEAD.match(text)) is None:
        return None
    arguments, place = _Reader(text).arguments(head.end())
    return Call(head[1], arguments_text(arguments)) if place == len(text) else None


class _Reader:
    """Reads values from the text; each method returns what it has read, and where the rest begins.

    Raises:
        ValueError, RecursionError: it cannot be read.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def arguments(self, place: int) -> tuple[dict[str, Any], int]:
        """Up to the bracket behind them."""
        found: dict[str, Any] = {}
        while not self._text.startswith(")", place):
            key = self._match(_KEY, place)
            found[key[1]], place = self._value(key.end())
            place = self._next(place, ")")
        return found, place + 1

    def _value(self, place: int) -> tuple[Any, int]:
        opening = self._text[place : place + 1]
        if opening in _CLOSING:
            return self._several(place + 1, _CLOSING[opening])
        if opening in ("'", '"'):
            text = self._match(_TEXT, place)
            return _ESCAPE.sub(_unescaped, text[2]), text.end()
        word = self._match(_WORD, place)
        return _WORDS[word[1]] if word[1] in _WORDS else _number(word[1]), word.end()

    def _several(self, place: int, closing: str) -> tuple[Any, int]:
        """A list, a tuple or a dictionary."""
        values: list[Any] = []
        pairs: dict[str, Any] = {}
        place = self._skip(place)
        while not self._text.startswith(closing, place):
            value, place = self._value(place)
            if closing == "}":
                if not self._text.startswith(":", place):
                    raise ValueError("a set")
                pairs[str(value)], place = self._value(self._skip(place + 1))
            else:
                values.append(value)
            place = self._next(place, closing)
        return pairs if closing == "}" else values, self._skip(place + 1)

    def _next(self, place: int, closing: str) -> int:
        """Behind the comma that must be here, unless everything ends."""
        place = self._skip(place)
        return place if self._text.startswith(closing, place) else self._match(_COMMA, place).end()

    def _skip(self, place: int) -> int:
        while self._text[place : place + 1].isspace():
            place += 1
        return place

    def _match(self, pattern: re.Pattern[str], place: int) -> re.Match[str]:
        if (found := pattern.match(self._text, place)) is None:
            raise ValueError(f"unreadable at {place}")
        return found


def _number(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return float(word)  # such as 1. and .5


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPED.get(code, "\\" + code)
