"""Reasoning before the answer: ``<think>...</think>``, where some templates put the start tag into the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ....protocol.reasoning import END, START
from ..tools.hermes import HermesParser
from ..tools.parser import held_back
from .content import Reader


def find_reasoning_parser(name: str, template: str) -> str:
    """As configured, or derived from the chat template: one with an end tag belongs to a model that reasons."""
    if name != "auto":
        return name
    if "<|channel|>analysis" in template:
        return "harmony"
    return "think" if END in template else "none"


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's reasoning."""

    text: str


def calls_behind(thoughts: str, calls: type[HermesParser] | None) -> int | None:
    """Where the calls begin with which this reasoning ends; None: with none.

    Qwen 3.5 may leave out the end tag in front of them. Others are part of the reasoning.
    """
    begin, end = None, len(thoughts.rstrip())
    while calls is not None and thoughts.endswith(calls.end, 0, end):
        place = thoughts.rfind(calls.start, 0, end)
        if place < 0 or not calls.begins(thoughts[place + len(calls.start) : end]):
            break
        begin, end = place, len(thoughts[:place].rstrip())
    return begin


def _possible_call(text: str, calls: type[HermesParser] | None) -> int | None:
    """Where a call begins, or may do so once there is more text."""
    place = -1
    while calls is not None and (place := text.find(calls.start, place + 1)) >= 0:
        if calls.begins(text[place + len(calls.start) :]) is not False:
            return place
    return None


class _Stage(Enum):
    BEFORE = auto()  # only white space so far
    OPENED = auto()  # start tag, no reasoning yet
    INSIDE = auto()
    BEHIND = auto()  # end tag, no answer yet
    ANSWER = auto()


class ThoughtReader(Reader):
    """Divides one answer, piece by piece. Everything outside of the tags at its beginning is the answer.

    White space around the reasoning belongs to neither.
    """

    def __init__(self, *, is_open: bool, is_begun: bool = False, calls: type[HermesParser] | None = None) -> None:
        """``is_begun``: the prompt contains some reasoning besides its tag, and the answer continues inside it.
        ``calls``: reasoning without an end tag may end with calls in this format.
        """
        super().__init__()
        self._calls = calls
        self._is_open = is_open  # a start tag is then redundant; some models write it nevertheless
        self._stage = _Stage.INSIDE if is_begun else _Stage.BEFORE

    @property
    def is_over(self) -> bool:
        """Whether everything that follows is the answer."""
        return self._is_at(_Stage.ANSWER)

    def push(self, text: str) -> tuple[str, str]:
        self._num_chars += len(text)
        if self.is_over:
            return "", self._found(text)
        self._text += text
        if self._is_at(_Stage.BEFORE):
            self._begin()
        if self._is_at(_Stage.OPENED):
            self._skip_space(_Stage.INSIDE)
        thought = self._think() if self._is_at(_Stage.INSIDE) else ""
        if self._is_at(_Stage.BEHIND):
            self._skip_space(_Stage.ANSWER)
        answer = ""
        if self._is_at(_Stage.ANSWER):
            answer, self._text = self._found(self._text), ""
        return thought, answer

    def flush(self) -> tuple[str, str]:
        rest, self._text = self._text, ""
        if not self._is_open:
            return "", self._found(rest)
        place = calls_behind(rest, self._calls)
        return (rest.rstrip(), "") if place is None else (rest[:place].rstrip(), self._found(rest[place:]))

    def _found(self, answer: str) -> str:
        """Record the last characters received as part of the answer."""
        self.content.add(self._num_chars - len(answer), self._num_chars)
        return answer

    def _is_at(self, stage: _Stage) -> bool:
        return self._stage is stage

    def _begin(self) -> None:
        begun = self._text.lstrip()
        if self._is_open:
            self._text = begun
        if begun.startswith(START):
            self._is_open, self._stage, self._text = True, _Stage.OPENED, begun.removeprefix(START)
        elif not START.startswith(begun):
            self._stage = _Stage.OPENED if self._is_open else _Stage.ANSWER

    def _skip_space(self, following: _Stage) -> None:
        self._text = self._text.lstrip()
        if self._text:
            self._stage = following

    def _think(self) -> str:
        before, tag, after = self._text.partition(END)
        if tag:
            self._stage, self._text = _Stage.BEHIND, after
            return before.rstrip()
        told = _possible_call(before, self._calls)
        if told is None:
            marks = (END,) if self._calls is None else (END, self._calls.start)
            told = len(before) - max(held_back(before, mark) for mark in marks)
        thought = before[:told].rstrip()
        self._text = before[len(thought) :]
        return thought
