"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5, Qwen 3 and relatives."""

from __future__ import annotations

import json
from typing import Protocol

from .parser import UNREADABLE, Call, Found, call_of, held_back, visible
from .strings import MarkFinder


class EndFinder(Protocol):
    """Tells the tag that ends a call from the same text within its arguments."""

    hidden: int | None  # where the first tag begins that was taken for a part of an argument

    def find(self, text: str) -> int | None:
        """Where the end tag begins in ``text``, which begins with the text of the previous call."""
        ...


class HermesParser:
    """What precedes a start tag is text; what lies between the tags is a call.

    An end tag within an argument is part of it, unless an error, such as a quote too many, only makes it look so: then
    nothing up to a later tag can be read.
    """

    start, end = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._text = ""  # received but not returned yet, without the start tag
        self._finder: EndFinder | None = None  # of the call's end; None: outside of a call
        self._tags = self.start, self.end  # of the call

    def push(self, text: str) -> Found:
        self._text += text
        found: Found = []
        while True:
            if self._finder is None:
                if (before := self._open()) is None:
                    break
                found += visible(before)
            elif (place := self._finder.find(self._text)) is not None:
                found += self._close(place)
            else:
                return found
        told = len(self._text) - self._num_held()
        text, self._text = self._text[:told], self._text[told:]
        return found + visible(text)

    @property
    def is_holding(self) -> bool:
        return self._finder is not None or bool(self._text)

    def flush(self) -> Found:
        found: Found = []
        while self._finder is not None:
            if last := self.last_calls_in(self._text):
                self._text, self._finder = "", None
                return [*found, *last]
            if self._finder.hidden is None:
                self._text, self._finder = self._tags[0] + self._text, None
            else:
                found += self._close(self._finder.hidden) + self.push("")
        rest, self._text = self._text, ""
        return found + visible(rest)

    @classmethod
    def begins(cls, text: str) -> bool | None:
        """Whether the text behind a start tag is a call, and the tag not only mentioned; None: it is too short."""
        begun = text.lstrip()
        return begun.startswith("{") if begun else None

    def make_finder(self) -> EndFinder:
        return MarkFinder(self.end)

    def _open(self) -> str | None:
        """Enter the next call; returns what precedes it, or None if none begins."""
        before, tag, after = self._text.partition(self.start)
        if not tag:
            return None
        self._text, self._finder, self._tags = after, self.make_finder(), (self.start, self.end)
        return before

    def _num_held(self) -> int:
        """How many characters at the end of the text may be a part of a tag."""
        return held_back(self._text, self.start)

    def last_calls_in(self, text: str) -> Found:
        """What follows a start tag, if the answer ended without the end tag; nothing if no call is complete."""
        return self.calls_in(text)

    def calls_in(self, text: str) -> Found:
        """What is between two tags; nothing if it cannot be parsed."""
        call = self.call_in(text)
        return [] if call is None else [call]

    def call_in(self, text: str) -> Call | None:
        """The call between two tags; None if it cannot be parsed."""
        try:
            return call_of(json.loads(text))
        except UNREADABLE:
            return None

    def _close(self, place: int) -> Found:
        """Calls that end at this tag, or text including the tags if it cannot be parsed."""
        assert self._finder is not None, "within a call"
        calls, hidden, self._finder = self.calls_in(self._text[:place]), self._finder.hidden, None
        if not calls and hidden is not None:
            place = hidden
        start, end = self._tags
        text, self._text = self._text[:place], self._text[place + len(end) :]
        return calls or [f"{start}{text}{end}"]
