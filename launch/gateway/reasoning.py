"""What becomes of the thoughts in an answer: whether they are divided from it, told, and how many tokens they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from ...protocol.errors import TokenizationFailed
from .chat_messages import json_text
from .harmony import HarmonyReader, end_of_thoughts
from .schemas.chat import ChatRequest
from .schemas.responses import ResponseRequest
from .state import Gateway
from .thoughts import END, START, ThoughtReader
from .token_ids import chat_ids
from .words import Words

_ON, _OFF = "/think", "/no_think"  # in messages, where a template looks for them
_QUESTION = {"role": "user", "content": "?"}
MAX_KNOWN = 256  # sets of variables for the template, and of who spoke last
MAX_KNOWN_CHARS = 1024  # of one of them
_END_TOKENS = 32  # of a prompt: more than the start tag has


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What becomes of the thoughts in the answers to one request."""

    is_split: bool = False  # from the answer
    is_open: bool = False  # the prompt ends within them
    is_told: bool = True
    is_begun: bool = False  # and there are some in it already
    has_channels: bool = False  # see harmony.py

    def reader(self) -> ThoughtReader | HarmonyReader | None:
        if self.has_channels:
            return HarmonyReader()
        return ThoughtReader(is_open=self.is_open, is_begun=self.is_begun) if self.is_split else None

    @classmethod
    def continued(cls, begun: str, *, is_told: bool) -> Reasoning:
        """Of an answer that goes on where ``begun`` ends: all of it is content if that had an end of thoughts, or none
        in front of it.
        """
        begun = begun.lstrip()
        if begun and (END in begun or not begun.startswith(START)):
            return cls()
        return cls(True, bool(begun), is_told, is_begun=bool(begun.removeprefix(START).strip()))

    @property
    def mark(self) -> str:
        """What the id of the answer says of it, for whoever resumes it."""
        kind = "h" if self.has_channels else "b" if self.is_begun else "o" if self.is_open else "t"
        mark = kind if self.is_split else ""
        return mark if self.is_told else mark.upper()

    @classmethod
    def of_mark(cls, mark: str) -> Reasoning:
        kind = mark.lower()
        is_open, is_begun = kind in ("o", "b"), kind == "b"
        return cls(bool(kind), is_open, is_told=mark == kind, is_begun=is_begun, has_channels=kind == "h")

    def num_tokens(self, gateway: Gateway, answers: Sequence[Sequence[int]]) -> int:
        """Of all thoughts in these answers, with their tags."""
        return sum(self._num_tokens(gateway.words, ids) for ids in answers) if self.is_split else 0

    def _num_tokens(self, words: Words, token_ids: Sequence[int]) -> int:
        contents = [words.bytes_of(token_id) for token_id in token_ids]
        end = self._end(b"".join(contents))
        num_bytes = num_tokens = 0
        while num_bytes < end:
            num_bytes += len(contents[num_tokens])
            num_tokens += 1
        return num_tokens

    def _end(self, answer: bytes) -> int:
        """Bytes up to the end of the thoughts."""
        if self.has_channels:
            return end_of_thoughts(answer)
        if not self.is_open and not answer.decode(errors="replace").lstrip().startswith(START):
            return 0
        end = answer.find(END.encode())
        return len(answer) if end < 0 else end + len(END)


async def with_reasoning(
    gateway: Gateway, request: Request, asked: dict[str, Any], body: ChatRequest | ResponseRequest
) -> tuple[dict[str, Any], Reasoning]:
    """``asked``, what ``body`` asks of the pipeline, as the thoughts of its answer want it, and what becomes of these.

    An answer that must have a form has it from its first token on, so there are none.

    Raises:
        RequestError: the pipeline refused the question how the prompt ends.
    """
    if gateway.reasoning_parser == "none" or "structured" in asked:
        return asked, Reasoning()
    has_channels = gateway.reasoning_parser == "harmony"
    words = await asyncio.to_thread(lambda: gateway.words)  # the tokenizer may have to be loaded first
    if has_channels or words.is_special_word(END):  # the text keeps its special tokens then
        asked = {**asked, "skip_special_tokens": False}
    if body.separate_reasoning is False:
        return asked, Reasoning()
    is_told = body.include_reasoning is not False
    if has_channels:  # a turn that is continued is in the last of them, and has no marks to come
        is_split = not asked.get("continue_final_message")
        return asked, Reasoning(is_split, is_told=is_told, has_channels=is_split)
    if asked.get("continue_final_message"):
        return asked, Reasoning.continued(asked["messages"][-1]["content"], is_told=is_told)
    return asked, Reasoning(True, await _is_open(gateway, request, asked), is_told)


async def _is_open(gateway: Gateway, request: Request, asked: Mapping[str, Any]) -> bool:
    """Whether the prompt ends within the thoughts.

    That is up to the template, its variables and who spoke last, so it is asked once for each of them; only the
    messages themselves tell it where the template looks for switches in them.
    """
    variables, messages = asked.get("chat_template_kwargs", {}), asked["messages"]
    is_switched = any(word in message["content"] for message in messages for word in (_ON, _OFF))
    if is_switched and _OFF in (gateway.facts.chat_template or ""):
        return await _ends_open(gateway, request, asked)
    last = messages[-1]["role"] if messages else "user"
    key = json_text([last, sorted(variables.items())], "chat_template_kwargs")
    if (known := gateway.open_prompts.get(key)) is None:
        try:
            question = {**asked, "messages": [_QUESTION]} if last == "user" else asked
            known = await _ends_open(gateway, request, question)
        except TokenizationFailed:  # a template that wants more than a question
            return await _ends_open(gateway, request, asked)
        if len(gateway.open_prompts) < MAX_KNOWN and len(key) <= MAX_KNOWN_CHARS:
            gateway.open_prompts[key] = known
    return known


async def _ends_open(gateway: Gateway, request: Request, asked: Mapping[str, Any]) -> bool:
    end_only = {**asked, "truncation": "left", "max_prompt_tokens": _END_TOKENS}
    ids = await chat_ids(gateway, request, end_only)
    return gateway.words.decode(ids, skip_special_tokens=False).rstrip().endswith(START)
