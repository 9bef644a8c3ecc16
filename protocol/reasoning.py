"""Where the reasoning of an answer ends, told from its tokens. An answer with a prescribed form has the form after it.

prepare determines how the answer to a prompt may begin; execute finds the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arrays import Int32

START, END = "<think>", "</think>"
TURN, CHANNEL, FINAL, MESSAGE = "<|start|>", "<|channel|>", "final", "<|message|>"
TO, CALL = " to", "<|call|>"
TOOL_CALL = "<tool_call>"


class Tags(NamedTuple):
    """The answer begins with reasoning if the prompt ends inside it, or if its first token is the start tag."""

    start: int  # ids of both tags
    end: int
    is_open: bool  # the prompt ends inside the reasoning
    budget: int | None = None  # tokens between the tags, at most; then the end tag is the only choice
    call: int | None = None  # the mark before a call, which some models write without the end tag in front of it

    def is_spent(self, answer: Int32) -> bool:
        """Whether an answer that is still within the reasoning has as many tokens of it as it may have."""
        return self.budget is not None and len(answer) - (not self.is_open) >= self.budget

    def is_calling(self, answer: Int32) -> bool:
        """Whether a call has begun, which the end tag would cut in two."""
        return self.call is not None and bool((answer == self.call).any())

    @property
    def first(self) -> int | None:
        """The token with which an answer may begin instead of with its form; None: it begins with reasoning."""
        return None if self.is_open else self.start

    def find_form(self, answer: Int32) -> int | None:
        """The index of the form's first token, which may be the next one; None: the answer is still before it."""
        if not self.is_open and len(answer) and answer[0] != self.start:
            return 0
        places = np.flatnonzero(answer == self.end)
        return int(places[0]) + 1 if len(places) else None


class Calls(NamedTuple):
    """A message to a tool may end an answer in channels: its head says to whom it is."""

    turn: int  # the mark before the head of each message but the first
    to: int  # a word in the head, before the recipient
    call: int  # the mark that ends it, and the answer


class Channels(NamedTuple):
    """Answers in channels ("OpenAI harmony response format", 2025): the channel "final" has the form."""

    channel: int  # the mark before the name of a channel
    final: int  # that name
    message: int  # the mark before what is said in the channel
    calls: Calls | None = None  # None: the answer must have the form

    @property
    def first(self) -> int | None:
        return None

    def ends_call(self, answer: Int32) -> int | None:
        """The token that may end an answer that has no form yet; None: it is not in a message to a tool."""
        if self.calls is None:
            return None
        turn, to, call = self.calls
        begun = np.flatnonzero(answer == turn)
        message = answer[begun[-1] :] if len(begun) else answer
        heads = np.flatnonzero(message == self.message)
        return call if len(heads) and to in message[: heads[0]] else None

    def find_form(self, answer: Int32) -> int | None:
        for place in np.flatnonzero(answer == self.message).tolist():
            heads = np.flatnonzero(answer[:place] == self.channel)
            if len(heads) and answer[heads[-1] + 1] == self.final:
                return int(place) + 1
        return None


Reasoning = Tags | Channels


def to_wire(reasoning: Reasoning) -> list[Any]:
    return ["tags" if isinstance(reasoning, Tags) else "channels", *reasoning]


def from_wire(values: list[Any]) -> Reasoning:
    """The inverse of ``to_wire``."""
    kind, *ids = values
    if kind == "channels":
        return Channels(*ids[:3], *(Calls(*calls) for calls in ids[3:] if calls))
    return Tags(*ids)
