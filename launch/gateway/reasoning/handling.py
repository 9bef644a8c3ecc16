"""How the reasoning in an answer is handled: whether it is split off, returned, and how many tokens it has."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from starlette.requests import Request

from ....protocol.errors import TokenizationFailed
from ....protocol.reasoning import CHANNEL, END, FINAL, MESSAGE, START
from ..requests.chat_messages import json_text
from ..requests.token_ids import chat_ids
from ..requests.words import Words
from ..schemas.chat import ChatRequest
from ..schemas.responses import ResponseRequest
from ..state import Gateway
from ..tools.hermes import HermesParser
from ..tools.parser import parser_within_thoughts
from .content import ContentTokens
from .harmony import HarmonyReader, thoughts_in
from .thoughts import ThoughtReader, calls_behind

_ON, _OFF = "/think", "/no_think"  # switches that some templates look for in messages
_QUESTION = {"role": "user", "content": "?"}
MAX_KNOWN = 256  # cached combinations of template variables and last role
MAX_KNOWN_CHARS = 1024  # of one combination
_END_TOKENS = 32  # of a prompt: more than the start tag has


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How the reasoning in the answers to one request is handled."""

    is_split: bool = False  # split off from the answer
    is_open: bool = False  # the prompt ends inside it
    is_told: bool = True  # returned to the client
    is_begun: bool = False  # the prompt already contains part of it
    has_channels: bool = False  # see harmony.py
    calls: type[HermesParser] | None = None  # it may end with calls in this format

    def reader(self) -> ThoughtReader | HarmonyReader | None:
        if self.has_channels:
            return HarmonyReader()
        if not self.is_split:
            return None
        return ThoughtReader(is_open=self.is_open, is_begun=self.is_begun, calls=self.calls)

    def content_tokens(self, words: Words) -> ContentTokens:
        return ContentTokens(words, self.reader())

    def before(self, tool_parser: str) -> Reasoning:
        """The same, for an answer that may call tools in the format of this parser."""
        return replace(self, calls=parser_within_thoughts(tool_parser))

    @classmethod
    def continued(cls, begun: str, *, is_told: bool) -> Reasoning:
        """For an answer that continues ``begun``: all of it is content if ``begun`` contains the end of the reasoning,
        or starts without any.
        """
        begun = begun.lstrip()
        if begun and (END in begun or not begun.startswith(START)):
            return cls()
        return cls(True, bool(begun), is_told, is_begun=bool(begun.removeprefix(START).strip()))

    @property
    def mark(self) -> str:
        """The part of the answer's id that tells how to handle its reasoning when it is resumed."""
        kind = "h" if self.has_channels else "b" if self.is_begun else "o" if self.is_open else "t"
        mark = kind if self.is_split else ""
        return mark if self.is_told else mark.upper()

    @classmethod
    def of_mark(cls, mark: str) -> Reasoning:
        kind = mark.lower()
        is_open, is_begun = kind in ("o", "b"), kind == "b"
        return cls(bool(kind), is_open, is_told=mark == kind, is_begun=is_begun, has_channels=kind == "h")

    def num_tokens(self, gateway: Gateway, answers: Sequence[Sequence[int]]) -> int:
        """Tokens of all reasoning in these answers, including its tags."""
        return sum(self._num_tokens(gateway.words, ids) for ids in answers) if self.is_split else 0

    def _num_tokens(self, words: Words, token_ids: Sequence[int]) -> int:
        contents = [words.bytes_of(token_id) for token_id in token_ids]
        has_end = len(token_ids) > 0 and words.is_special(token_ids[-1])
        spans = self._spans(b"".join(contents), mark=contents[-1] if has_end else b"")
        begins = list(accumulate(map(len, contents), initial=0))[:-1]
        return sum(bisect_left(begins, end) - bisect_left(begins, first) for first, end in spans)

    def _spans(self, answer: bytes, *, mark: bytes) -> list[tuple[int, int]]:
        """Where the reasoning is, in bytes. ``mark``: that of the answer's end, if it has one."""
        if self.has_channels:
            return thoughts_in(answer)
        if not self.is_open and not answer.decode(errors="replace").lstrip().startswith(START):
            return []
        end = answer.find(END.encode())
        if end >= 0:
            return [(0, end + len(END))]
        place = calls_behind(answer.removesuffix(mark).decode("latin-1"), self.calls)  # a character for each byte
        return [(0, len(answer) if place is None else place)]


async def with_reasoning(
    gateway: Gateway, request: Request, asked: dict[str, Any], body: ChatRequest | ResponseRequest
) -> tuple[dict[str, Any], Reasoning]:
    """The pipeline's request ``asked``, adjusted to the reasoning of its answer, and how that is handled.

    The form that an answer must have begins after its reasoning, if the pipeline can tell where that ends and the
    reasoning is not left in the content. Otherwise there is no reasoning: the form begins with the first token.

    Raises:
        RequestError: the pipeline refused to render the end of the prompt.
    """
    if body.thinking_token_budget is not None:
        asked = {**asked, "thinking_token_budget": body.thinking_token_budget}
    if gateway.reasoning_parser == "none":
        return asked, Reasoning()
    has_channels = gateway.reasoning_parser == "harmony"
    words = await gateway.load_words()
    if (form := asked.get("structured")) is not None:
        is_left_in = body.separate_reasoning is False or asked.get("continue_final_message")
        if is_left_in or not words.are_tokens(*((CHANNEL, FINAL, MESSAGE) if has_channels else (START, END))):
            return asked, Reasoning()
        asked = {**asked, "structured": {**form, "after_reasoning": True}}
    if has_channels or words.is_special_word(END):  # the tags must not be stripped as special tokens
        asked = {**asked, "skip_special_tokens": False}
    if body.separate_reasoning is False:
        return asked, Reasoning()
    is_told = body.include_reasoning is not False
    if has_channels:  # a continued turn is in its last channel, and has no further marks
        is_split = not asked.get("continue_final_message")
        return asked, Reasoning(is_split, is_told=is_told, has_channels=is_split)
    if asked.get("continue_final_message"):
        return asked, Reasoning.continued(asked["messages"][-1]["content"], is_told=is_told)
    return asked, Reasoning(True, await _is_open(gateway, request, asked), is_told)


async def can_limit(gateway: Gateway) -> bool:
    """Whether the pipeline can end the reasoning of this model after some number of tokens."""
    return gateway.reasoning_parser == "think" and (await gateway.load_words()).are_tokens(START, END)


async def _is_open(gateway: Gateway, request: Request, asked: Mapping[str, Any]) -> bool:
    """Whether the prompt ends inside the reasoning.

    This depends on the template, its variables and the last role, so it is determined once for each combination; the
    messages themselves matter only if the template looks for switches in them.
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
        except TokenizationFailed:  # the template needs more than a question
            return await _ends_open(gateway, request, asked)
        if len(gateway.open_prompts) < MAX_KNOWN and len(key) <= MAX_KNOWN_CHARS:
            gateway.open_prompts[key] = known
    return known


async def _ends_open(gateway: Gateway, request: Request, asked: Mapping[str, Any]) -> bool:
    end_only = {**asked, "truncation": "left", "max_prompt_tokens": _END_TOKENS}
    ids = await chat_ids(gateway, request, end_only)
    return gateway.words.decode(ids, skip_special_tokens=False).rstrip().endswith(START)
