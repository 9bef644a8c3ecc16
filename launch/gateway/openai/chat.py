"""/v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp

from ....driver.stream import Completion, Delta
from ..answer import AnswerReader, Parts, divide, echo_of, thought_fields
from ..errors import ApiError, unsupported
from ..forms.calls import ToolUse, tool_use
from ..forms.structure import structured_options
from ..reasoning.content import ContentTokens
from ..reasoning.handling import Reasoning, with_reasoning
from ..requests.chat_messages import text_of, wire_messages
from ..requests.generation import Generation
from ..requests.ids import new_id
from ..requests.parameters import check_stream, form_name, named_as, pipeline_options
from ..requests.replies import CHAT_TEXT, ChunkWriter, Head
from ..requests.token_ids import prompt_ids
from ..requests.usage import usage
from ..schemas.chat import ChatRequest
from ..schemas.sampling import StreamOptions, says_usage
from ..serving.streaming import DONE
from ..state import Gateway
from .logprobs import content_logprobs, prompt_logprobs

KIND = "chatcmpl"
OBJECT = "chat.completion"


async def create_chat_completion(gateway: Gateway, body: ChatRequest, request: Request) -> ASGIApp:
    """The reply, complete or as a stream.

    Raises:
        TriptychError: the request was refused.
    """
    model = gateway.ready_model(body.model)
    check_stream(body)
    tools = await chat_tools(gateway, body)
    asked = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    form = "tools" if tools.is_forced else form_name(body)
    with named_as(prompt="messages", max_tokens=asked, logprobs="top_logprobs", structured=form):
        wanted, reasoning = await with_reasoning(gateway, request, chat_request(gateway, body, tools), body)
        n, mark = body.n or 1, reasoning.mark
        head = Head(new_id(KIND + tools.id_part, body.request_id, num_choices=n, thoughts=mark), OBJECT, model)
        generation = await Generation.begin(
            gateway, request, head.request_id, [wanted], model=model, keep=bool(body.resumable)
        )
        reply = ChatReply.of(gateway, head, body, tools, reasoning)
        if body.stream:
            return generation.stream(reply.events(generation))
        return await generation.reply(reply.whole)


async def chat_tools(gateway: Gateway, body: ChatRequest) -> ToolUse:
    """What the answer may do with tools, given the form of its text.

    Raises:
        ApiError: the model cannot call the tools, or the choice or the form cannot be enforced.
    """
    tools = tool_use(gateway, body.tools, body.tool_choice, single=body.parallel_tool_calls is False)
    return await tools.beside(gateway, structured_options(body.response_format, body.structured_outputs))


def chat_request(gateway: Gateway, body: ChatRequest, tools: ToolUse) -> dict[str, Any]:
    """The request for the pipeline."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs and not body.logprobs:
        raise ApiError(f"top_logprobs is {body.top_logprobs}, it needs logprobs: true", param="top_logprobs")
    options = pipeline_options(
        body, gateway, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs
    )
    options |= structured_options(body.response_format, body.structured_outputs) | tools.options()
    template = gateway.facts.chat_template or ""
    options |= body.template_options(template)
    if body.echo and not body.continue_final_message:
        raise unsupported("echo", "echo is true, which requires continue_final_message: true")
    return {"messages": wire_messages(body.messages, template=template), **options}


class Known(NamedTuple):
    """The part of a resumed choice that the client already has."""

    token_ids: list[int]
    text: str  # of these tokens, possibly with some text of the following ones


@dataclass
class ChatReply:
    """Produces one reply, complete or as events."""

    gateway: Gateway
    head: Head
    tools: ToolUse
    reasoning: Reasoning
    with_logprobs: bool = False
    with_token_ids: bool = False
    num_prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    with_ids: bool = False  # give each event an id, for a resumable stream
    num_choices: int = 1
    echo: Parts = field(default_factory=list)  # in front of each choice
    positions: list[int] | None = None  # tokens that the client has of each choice; None: it is a new request
    known: list[Known] | None = None  # those tokens, if what follows depends on them

    def __post_init__(self) -> None:
        self.reasoning = self.reasoning.before(self.tools.parser)

    @classmethod
    def of(cls, gateway: Gateway, head: Head, body: ChatRequest, tools: ToolUse, reasoning: Reasoning) -> ChatReply:
        return cls(
            gateway, head, tools, reasoning,
            with_logprobs=bool(body.logprobs),
            with_token_ids=bool(body.return_token_ids),
            num_prompt_logprobs=body.prompt_logprobs,
            stream_options=body.stream_options,
            with_ids=bool(body.resumable),
            num_choices=body.n or 1,
            echo=echo_of(text_of(body.messages[-1].content), reasoning) if body.echo else [],
        )  # fmt: skip

    @property
    def is_plain(self) -> bool:
        """Whether the whole answer is plain text."""
        return not self.reasoning.is_split and self.tools.parser == "none"

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        reply = {**self.head.fields(), "choices": choices, "usage": self._usage(completions)}
        if self.num_prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(self.gateway.words, completions[0], top=self.num_prompt_logprobs)
        return reply

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        reader = AnswerReader(self.reasoning, self.tools)
        thoughts, text, calls = divide([*self.echo, *reader.read(completion.text)])
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if thoughts:
            message |= thought_fields(thoughts)
        if calls:
            message["content"] = text.strip() or None
            message["tool_calls"] = [reader.call_map(call) for call in calls]
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": reader.finish_reason(completion.finish_reason),
        }
        if self.with_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = prompt_ids(completion.summary)
        return choice

    def _usage(self, completions: list[Completion]) -> dict[str, Any]:
        ids = [completion.token_ids for completion in completions]
        if self.known is not None:
            ids = [known.token_ids + rest for known, rest in zip(self.known, ids, strict=True)]
        num_reasoning = self.reasoning.num_tokens(self.gateway, ids)
        return usage(completions, num_choices=self.num_choices, num_reasoning=num_reasoning)

    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        tokens = self.reasoning.content_tokens(self.gateway.words)
        return _content_map(content_logprobs(self.gateway.words, tokens, completion) + tokens.flush())

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        head = Head(self.head.request_id, "chat.completion.chunk", self.head.model, self.head.created)
        with_usage = bool(self.stream_options and self.stream_options.include_usage)
        starts = self.positions or [0] * self.num_choices
        choices = [self._streamed_choice(index) for index in range(self.num_choices)]
        writer = ChunkWriter(
            head, shape=CHAT_TEXT,
            with_usage=with_usage, positions=list(starts) if self.with_ids else None,
            num_prompt_tokens=generation.num_prompt_tokens if says_usage(self.stream_options) else None,
        )  # fmt: skip
        for choice in choices if self.with_ids else ():  # at once: a client that does not know the id cannot resume
            for event in choice.opening(writer):
                yield event
        is_plain = not (self.with_logprobs or self.with_token_ids)
        async for index, piece in generation.pieces():
            choice = choices[index]
            for event in choice.opening(writer):
                yield event
            if isinstance(piece, Completion):
                choice.end(piece.finish_reason, choice.tokens.flush())
                for event in choice.events(writer, starts[index] + len(piece.token_ids)):
                    yield event
                continue
            choice.catch_up(piece)
            if is_plain and choice.reader.is_plain:
                if piece.text:  # empty for an incomplete character or a special token
                    yield writer.text(index, piece.text, num_tokens=piece.num_tokens)
                continue
            logprobs = content_logprobs(self.gateway.words, choice.tokens, piece) if self.with_logprobs else []
            choice.push(piece.text, {"token_ids": piece.token_ids} if self.with_token_ids else {}, logprobs)
            if self.with_ids and choice.reader.is_holding:
                continue  # ids count tokens: resuming here would skip the text that is held back
            for event in choice.events(writer, piece.num_tokens):
                yield event
        if with_usage:
            yield writer.usage(self._usage(generation.ends))
        yield DONE

    def _streamed_choice(self, index: int) -> _StreamedChoice:
        known = "" if self.known is None else self.known[index].text
        reader, tokens = AnswerReader(self.reasoning, self.tools), self.reasoning.content_tokens(self.gateway.words)
        first = [{"role": "assistant", "content": "", "refusal": None}, *reader.deltas(self.echo)]
        return _StreamedChoice(index, reader, tokens, self.with_ids, known, first if self.positions is None else [])


@dataclass
class _StreamedChoice:
    """A streamed choice on its way to the client."""

    index: int
    reader: AnswerReader
    tokens: ContentTokens
    is_resumable: bool
    known: str  # text that the client has, possibly with more, until more of the answer arrives
    first: list[dict[str, Any]]  # deltas before the first token
    waiting: list[dict[str, Any]] = field(default_factory=list)  # chunks to be sent

    def opening(self, writer: ChunkWriter) -> Iterator[bytes]:
        """Once, with the first token: load generators take a first chunk, whatever is in it, for that token."""
        for delta in self.first:
            yield writer.choice(_chunk(self.index, delta), num_tokens=0)
        self.first = []

    def catch_up(self, first: Delta) -> None:
        """Feed the reader the text that the client has: it ends where the ``first`` delta begins."""
        if self.known:
            self.reader.push(self.known[: first.num_chars - len(first.text)])
            self.known = ""

    def push(self, text: str, extra: dict[str, Any], logprobs: list[Any]) -> None:
        """Take more text, further fields for its first chunk, and logprobs for its first chunk with content."""
        deltas = self.reader.deltas(self.reader.push(text)) or ([{"content": ""}] if extra else [])
        self._wait(deltas, logprobs, extra)

    def end(self, finish_reason: str, logprobs: list[Any]) -> None:
        if self.known:  # nothing came after what the client has, so it has the end as well
            self.reader.read(self.known)
        else:
            self._wait(self.reader.deltas(self.reader.flush()), logprobs, {})
        self.waiting.append(_chunk(self.index, {}, self.reader.finish_reason(finish_reason)))

    def _wait(self, deltas: list[dict[str, Any]], logprobs: list[Any], extra: dict[str, Any]) -> None:
        if logprobs and not any("content" in delta for delta in deltas):
            deltas = [*deltas, {"content": ""}]
        for delta in deltas:
            chunk = {**_chunk(self.index, delta), **extra}
            if logprobs and "content" in delta:
                chunk["logprobs"], logprobs = _content_map(logprobs), []
            self.waiting.append(chunk)
            extra = {}

    def events(self, writer: ChunkWriter, num_tokens: int) -> Iterator[bytes]:
        """Send the waiting chunks. For a resumable stream they are merged into one: a client can only resume between
        chunks with different token counts, and would otherwise receive the first of several again.
        """
        if self.is_resumable and self.waiting:
            self.waiting = [{**reduce(_sum, self.waiting), "index": self.index}]
        for chunk in self.waiting:
            yield writer.choice(chunk, num_tokens=num_tokens)
        self.waiting.clear()


def _content_map(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}


def _sum(first: Any, second: Any) -> Any:
    """The sum of texts, lists, or maps of these."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict):
        return {name: _sum(first.get(name), second.get(name)) for name in {**first, **second}}
    return first + second


def _chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
