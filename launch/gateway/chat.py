"""/v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from ...driver.stream import Completion, Delta
from .calls import CallReader, ToolUse, tool_use
from .chat_messages import wire_messages
from .errors import ApiError
from .generation import Generation
from .ids import new_id
from .logprobs import chat_logprobs, prompt_logprobs
from .parameters import check_stream, form_name, named_as, pipeline_options
from .replies import CHAT_TEXT, ChunkWriter, Head
from .schemas.chat import ChatRequest
from .schemas.sampling import StreamOptions
from .state import Gateway
from .structure import structured_options
from .token_ids import prompt_ids
from .tools.parser import Call
from .usage import usage

KIND = "chatcmpl"
OBJECT = "chat.completion"


async def create_chat_completion(gateway: Gateway, body: ChatRequest, request: Request) -> ASGIApp:
    """The reply, whole or as a stream.

    Raises:
        TriptychError: it was refused.
    """
    gateway.check_ready()
    model = gateway.check_model(body.model)
    check_stream(body)
    tools = tool_use(gateway, body.tools, body.tool_choice, single=body.parallel_tool_calls is False)
    request_id = new_id(KIND + tools.id_part, body.request_id, num_choices=body.n or 1)
    head = Head(request_id, OBJECT, model)
    asked = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    form = "tool_choice" if tools.form else form_name(body)
    with named_as(max_tokens=asked, logprobs="top_logprobs", structured=form):
        requests = [_request(gateway, body, tools)]
        generation = await Generation.begin(gateway, request, head.request_id, requests, keep=bool(body.resumable))
        reply = ChatReply.of(gateway, head, body, tools)
        if body.stream:
            return generation.stream(reply.events(generation))
        return await generation.reply(reply.whole)


def _request(gateway: Gateway, body: ChatRequest, tools: ToolUse) -> dict[str, Any]:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs and not body.logprobs:
        raise ApiError(f"top_logprobs is {body.top_logprobs}, it needs logprobs: true", param="top_logprobs")
    options = pipeline_options(
        body, gateway.config, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs
    )
    options |= structured_options(body.response_format, body.structured_outputs) | tools.options()
    if body.chat_template_kwargs:
        options["chat_template_kwargs"] = body.chat_template_kwargs
    return {"messages": wire_messages(body.messages, template=gateway.facts.chat_template or ""), **options}


@dataclass
class ChatReply:
    """The shapes of one reply."""

    gateway: Gateway
    head: Head
    tools: ToolUse
    with_logprobs: bool = False
    with_token_ids: bool = False
    num_prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    with_ids: bool = False  # an id for each event, for a stream that can be resumed
    num_choices: int = 1

    @classmethod
    def of(cls, gateway: Gateway, head: Head, body: ChatRequest, tools: ToolUse) -> ChatReply:
        return cls(
            gateway, head, tools,
            with_logprobs=bool(body.logprobs),
            with_token_ids=bool(body.return_token_ids),
            num_prompt_logprobs=body.prompt_logprobs,
            stream_options=body.stream_options,
            with_ids=bool(body.resumable),
            num_choices=body.n or 1,
        )  # fmt: skip

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        reply = {**self.head.fields(), "choices": choices, "usage": usage(completions, num_choices=self.num_choices)}
        if self.num_prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(self.gateway.words, completions[0], top=self.num_prompt_logprobs)
        return reply

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        reader = self.tools.reader()
        found = reader.push(completion.text) + reader.flush()
        calls = [part for part in found if isinstance(part, Call)]
        text = "".join(part for part in found if isinstance(part, str))
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if calls:
            message["content"] = text.strip() or None
            message["tool_calls"] = [reader.call_map(call) for call in calls]
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(completion.token_ids, completion.logprobs),
            "finish_reason": reader.finish_reason(completion.finish_reason),
        }
        if self.with_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = prompt_ids(completion.summary)
        return choice

    def _logprobs(self, token_ids: list[int], rows: Any) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        return {"content": chat_logprobs(self.gateway.words, token_ids, rows or []), "refusal": None}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        head = Head(self.head.request_id, "chat.completion.chunk", self.head.model, self.head.created)
        with_usage = bool(self.stream_options and self.stream_options.include_usage)
        writer = ChunkWriter(
            head, shape=CHAT_TEXT,
            with_usage=with_usage, positions=[0] * self.num_choices if self.with_ids else None,
            num_prompt_tokens=generation.num_prompt_tokens(self.stream_options),
        )  # fmt: skip
        for index in range(self.num_choices):
            first = {"role": "assistant", "content": "", "refusal": None}
            yield writer.choice(_chunk(index, first), num_tokens=0)
        is_plain = not (self.with_logprobs or self.with_token_ids)
        spoken = [_Spoken(self.tools.reader()) for _ in range(self.num_choices)]
        async for piece in generation.pieces():
            choice = spoken[piece.index]
            reader = choice.reader
            if piece.end is not None:
                choice.waiting += [_chunk(piece.index, delta) for delta in reader.deltas(reader.flush())]
                choice.waiting.append(_chunk(piece.index, {}, reader.finish_reason(piece.end.finish_reason)))
                for event in choice.say(writer, len(piece.end.token_ids)):
                    yield event
                continue
            text, num_tokens = "".join(delta.text for delta in piece.deltas), piece.deltas[-1].num_tokens
            if is_plain and reader.is_plain:
                if text:  # half of a character or a special token has none
                    yield writer.text(piece.index, text, num_tokens=num_tokens)
                continue
            extra = self._extra(piece.deltas)
            for delta in reader.deltas(reader.push(text)) or ([{"content": ""}] if extra else []):
                choice.waiting.append({**_chunk(piece.index, delta), **extra})
                extra = {}
            if self.with_ids and reader.is_holding:
                continue  # an id counts tokens, and who resumes there would miss what is held back of their text
            for event in choice.say(writer, num_tokens):
                yield event
        if with_usage:
            yield writer.usage(usage(generation.ends, num_choices=self.num_choices))
        yield b"data: [DONE]\n\n"

    def _extra(self, deltas: list[Delta]) -> dict[str, Any]:
        """What a chunk says of its tokens, besides their text."""
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        extra: dict[str, Any] = {"token_ids": token_ids} if self.with_token_ids else {}
        if self.with_logprobs:
            extra["logprobs"] = self._logprobs(token_ids, [row for delta in deltas for row in delta.logprobs or []])
        return extra


@dataclass
class _Spoken:
    """A choice of a stream on its way to the client."""

    reader: CallReader
    waiting: list[dict[str, Any]] = field(default_factory=list)  # chunks to come
    num_tokens: int = 0  # of those that were said

    def say(self, writer: ChunkWriter, num_tokens: int) -> Iterator[bytes]:
        """What waits. The last chunk counts its tokens: who lost the connection before it has not got them all."""
        for left in range(len(self.waiting), 0, -1):
            self.num_tokens = num_tokens if left == 1 else self.num_tokens
            yield writer.choice(self.waiting[-left], num_tokens=self.num_tokens)
        self.waiting.clear()


def _chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
