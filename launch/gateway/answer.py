"""The text of an answer divided into its parts: reasoning, content, and tool calls."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ...protocol.reasoning import MESSAGE, START
from .forms.calls import ToolUse
from .reasoning.handling import Reasoning
from .reasoning.thoughts import Thought
from .tools.parser import Call

Parts = list[Thought | str | Call]
_NEXT = re.compile(f"(?={re.escape(MESSAGE)})")  # where another message of an answer in channels may begin


class Divided(NamedTuple):
    """The parts of a complete answer, by kind."""

    thoughts: str
    text: str
    calls: list[Call]


def divide(parts: Parts) -> Divided:
    return Divided(
        thoughts="".join(part.text for part in parts if isinstance(part, Thought)),
        text="".join(part for part in parts if isinstance(part, str)),
        calls=[part for part in parts if isinstance(part, Call)],
    )


def echo_of(begun: str, reasoning: Reasoning) -> Parts:
    """The text that the client began, as the first part of the answer that continues it."""
    if not reasoning.is_open:
        return [begun]
    return [Thought(begun.lstrip().removeprefix(START).lstrip())] if reasoning.is_told else []


class AnswerReader:
    """Parses one answer, piece by piece. Reasoning comes first; in channels, more may follow later."""

    def __init__(self, reasoning: Reasoning, tools: ToolUse) -> None:
        self._thoughts = reasoning.reader()
        self._tells_thoughts = reasoning.is_told
        self._calls = tools.reader()

    @property
    def is_plain(self) -> bool:
        """Whether everything that follows is plain text."""
        return self._calls.is_plain and (self._thoughts is None or self._thoughts.is_over)

    @property
    def is_holding(self) -> bool:
        """Whether it holds back text that has not been returned yet."""
        return self._calls.is_holding or (self._thoughts is not None and self._thoughts.is_holding)

    def push(self, text: str) -> Parts:
        return [part for piece in _NEXT.split(text) for part in self._push(piece)]

    def flush(self) -> Parts:
        """The rest, once the answer has ended."""
        thought, text = ("", "") if self._thoughts is None else self._thoughts.flush()
        return [*self._told(thought), *(self._calls.push(text) if text else ()), *self._calls.flush()]

    def read(self, text: str) -> Parts:
        """Parse a complete answer."""
        return self.push(text) + self.flush()

    def finish_reason(self, reason: str) -> str:
        return self._calls.finish_reason(reason)

    def call_map(self, call: Call) -> dict[str, Any]:
        return self._calls.call_map(call)

    def deltas(self, parts: Parts) -> list[dict[str, Any]]:
        """One delta of a chat chunk per part."""
        thoughts = [thought_fields(part.text) for part in parts if isinstance(part, Thought)]
        return thoughts + self._calls.deltas([part for part in parts if not isinstance(part, Thought)])

    def _push(self, text: str) -> Parts:
        """Of a piece without the end of one message and the beginning of another: its reasoning precedes its text."""
        thought, text = ("", text) if self._thoughts is None else self._thoughts.push(text)
        return [*self._told(thought), *(self._calls.push(text) if text else ())]

    def _told(self, thought: str) -> Parts:
        return [Thought(thought)] if thought and self._tells_thoughts else []


def thought_fields(text: str) -> dict[str, str]:
    """Reasoning in a message or delta: in the field of DeepSeek, SGLang and llama.cpp, and of vLLM and OpenRouter."""
    return {"reasoning_content": text, "reasoning": text}
