"""Parses answers in channels, as written by gpt-oss ("OpenAI harmony response format", 2025).

``<|channel|>analysis<|message|>Reasoning.<|end|><|start|>assistant<|channel|>final<|message|>Answer.``
"""

from __future__ import annotations

import re
from enum import Enum, auto

from ....protocol.reasoning import CHANNEL, MESSAGE, TURN
from ..tools.harmony import CALL_END, CALL_START
from ..tools.parser import held_back
from ..tools.strings import MarkFinder
from .content import Reader

_HEADS = (CHANNEL, TURN)
_ENDS = ("<|end|>", "<|return|>", CALL_END, TURN)
_MAX_HEAD_CHARS = 512  # of a head, including the mark that ends it
_MARK = re.compile(r"\s*<\|(?:channel|start)\|>")
_THOUGHT = re.compile(r"\s*<\|channel\|>\s*analysis\b")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_THOUGHTS = re.compile(
    rb"(?:\A|<\|start\|>assistant|(?<=<\|end\|>))\s*<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)


def thoughts_in(answer: bytes) -> list[tuple[int, int]]:
    """Where the reasoning is in an answer, with its marks: begins and ends in bytes."""
    return [found.span() for found in _THOUGHTS.finditer(answer)]


class _Kind(Enum):
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


class HarmonyReader(Reader):
    """Divides one answer, piece by piece, like ``ThoughtReader``: the channel "analysis" is reasoning.

    A message to a tool is part of the answer, in the form that ``HarmonyParser`` reads. Other marks belong to neither,
    and whatever does not begin with a mark is text.
    """

    is_over = False  # another message may follow

    def __init__(self) -> None:
        super().__init__()
        self._kind: _Kind | None = None  # of the current message
        self._finder = MarkFinder(*_ENDS)  # of the end of a call
        self._has_thoughts = False

    def push(self, text: str) -> tuple[str, str]:
        self._text += text
        self._num_chars += len(text)
        thought = answer = ""
        while self._kind is not None or self._can_begin():
            if self._kind is None:
                prefix = self._begin()
                thought, answer = (thought + prefix, answer) if self._is_thought else (thought, answer + prefix)
            piece, is_closed = self._take()
            thought, answer = (thought + piece, answer) if self._is_thought else (thought, answer + piece)
            if not is_closed:
                break
            answer += CALL_END if self._kind is _Kind.CALL else ""
            self._kind = None
        return thought, answer

    def flush(self) -> tuple[str, str]:
        rest, self._text = self._text, ""
        if self._kind is None and rest.lstrip().startswith(_HEADS):  # a message that ends within its head
            return "", ""
        if self._kind is not _Kind.CALL and not self._is_thought:
            self.content.add(self._num_chars - len(rest), self._num_chars)
        return (rest, "") if self._is_thought else ("", rest)

    @property
    def _is_thought(self) -> bool:
        return self._kind is _Kind.THOUGHT

    def _can_begin(self) -> bool:
        """Whether the kind of message that the text starts with is known."""
        begun = self._text.lstrip()
        if MESSAGE in begun or len(self._text) > _MAX_HEAD_CHARS:
            return True
        return not (begun.startswith(_HEADS) or any(head.startswith(begun) for head in _HEADS))

    def _begin(self) -> str:
        """Consume the head of a message; returns what to put in front of its content."""
        head, mark, rest = self._text.partition(MESSAGE)
        begun = _MARK.match(head)
        if begun is None or not mark or len(head + mark) > _MAX_HEAD_CHARS:
            self._kind = _Kind.TEXT
            return self._cut(len(begun[0]) if begun else 0)  # otherwise this mark would end the message
        self._text = rest
        if (recipient := _RECIPIENT.search(head)) and recipient[1] != "assistant":
            self._kind, self._finder = _Kind.CALL, MarkFinder(*_ENDS)
            return f"{CALL_START}{recipient[1]}{MESSAGE}"
        self._kind = _Kind.THOUGHT if _THOUGHT.match(head.rpartition("assistant")[2]) else _Kind.TEXT
        is_more, self._has_thoughts = self._is_thought and self._has_thoughts, self._has_thoughts or self._is_thought
        return "\n" if is_more else ""

    def _take(self) -> tuple[str, bool]:
        """More of the message's content, and whether the message is complete."""
        if self._kind is _Kind.CALL:  # in one piece: its strings may contain marks
            place, keep = self._finder.find(self._text), len(self._text)
        else:
            place = min((found for end in _ENDS if (found := self._text.find(end)) >= 0), default=None)
            keep = max(held_back(self._text, end) for end in _ENDS)
        if place is None:
            return self._cut(len(self._text) - keep), False
        piece = self._cut(place)
        end = next(end for end in _ENDS if self._text.startswith(end))
        self._text = self._text if end == TURN else self._text.removeprefix(end)
        return piece, True

    def _cut(self, size: int) -> str:
        """Consume ``size`` characters of the message's content."""
        if self._kind is _Kind.TEXT:
            self.content.add(self.num_known, self.num_known + size)
        piece, self._text = self._text[:size], self._text[size:]
        return piece
