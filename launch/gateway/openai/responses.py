"""/v1/responses: chats in the format of OpenAI's Responses API. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ....driver.stream import Completion
from ....protocol.errors import TriptychError
from ..answer import AnswerReader, Parts
from ..errors import ApiError, error_map, json_response, required, unsupported
from ..forms.calls import ToolUse, tool_use
from ..forms.structure import structured_options
from ..reasoning.handling import Reasoning, with_reasoning
from ..reasoning.thoughts import Thought
from ..requests.chat_messages import text_of, wire_messages
from ..requests.generation import Generation
from ..requests.ids import new_id
from ..requests.parameters import check_stream, named_as, pipeline_options
from ..requests.token_ids import num_chat_tokens
from ..requests.usage import response_usage
from ..schemas.chat import ChatMessage, FunctionCall, Tool, ToolCall, ToolChoice, function_tools
from ..schemas.responses import PACKED_REASONING, InputItem, InputTokensRequest, ResponsePrompt, ResponseRequest
from ..schemas.structure import JsonSchema, ResponseFormat
from ..schemas.template_variables import effort_variables, template_variables
from ..state import Gateway
from ..tools.parser import Call
from .logprobs import content_logprobs
from .namespaces import Named, named_functions, tool_map
from .packed_reasoning import unpacked
from .response_events import Event, EventEncoder, EventWriter

KIND = "resp"


async def create_response(gateway: Gateway, body: ResponseRequest, request: Request) -> ASGIApp:
    """The reply, complete or as a stream of typed events.

    Raises:
        TriptychError: the request was refused.
    """
    model = gateway.ready_model(body.model)
    check_stream(body)
    structured = structured_options(_format(body), body.structured_outputs)
    tools = tool_use(gateway, _tools(body), _choice(body), single=body.parallel_tool_calls is False)
    tools = await tools.beside(gateway, structured)
    options = pipeline_options(body, gateway, max_tokens=body.max_output_tokens, logprobs=body.num_logprobs())
    options |= structured | tools.options()
    form = "tools" if tools.is_forced else "structured_outputs" if body.structured_outputs else "text.format"
    names = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "structured": form}
    with named_as(prompt="input", messages="input", **names):
        options |= _prompt(gateway, body)
        options, reasoning = await with_reasoning(gateway, request, options, body)
        reply = ResponseReply(gateway, body, new_id(KIND, body.request_id), model, tools, reasoning)
        generation = await Generation.begin(gateway, request, reply.request_id, [options], model=model)
        if body.stream:
            return generation.stream(reply.events(generation), failure_events=reply.failure_events)
        return await generation.reply(reply.whole)


async def count_input_tokens(gateway: Gateway, body: InputTokensRequest, request: Request) -> Response:
    """The number of tokens in the prompt that the model would get."""
    gateway.ready_model(body.model)
    tools = tool_use(gateway, _tools(body), _choice(body), single=False)
    with named_as(messages="input"):
        num_tokens = await num_chat_tokens(gateway, request, _prompt(gateway, body) | tools.options())
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


def _prompt(gateway: Gateway, body: ResponsePrompt) -> dict[str, Any]:
    """The messages, and variables for the chat template."""
    template = gateway.facts.chat_template or ""
    effort = effort_variables(body.effort, template, param="reasoning.effort")
    messages = wire_messages(_messages(body), template=template)
    return {"messages": messages, **template_variables(effort, body.chat_template_kwargs)}


def _messages(body: ResponsePrompt) -> list[ChatMessage]:
    system = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*system, ChatMessage(role="user", content=body.input)]
    messages, thoughts = system, ""
    for index, item in enumerate(body.input):
        if item.type == "reasoning":
            thoughts += text_of(item.content) or unpacked(item.encrypted_content)
            continue
        message = _message(index, item)
        if message.tool_calls and messages and messages[-1].role == "assistant" and not thoughts:
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), *message.tool_calls]  # of the same turn
            continue
        if message.role == "assistant":
            message.reasoning_content = thoughts or None
        thoughts = ""  # those of a turn that was cut before its answer lead to no other
        messages.append(message)
    return messages


def _message(index: int, item: InputItem) -> ChatMessage:
    name = f"input[{index}]"
    if item.type == "function_call":
        if item.name is None or item.call_id is None:
            raise ApiError(f"{name} is a function_call and needs name and call_id", param=name)
        function = FunctionCall(name=Named(item.name, item.namespace).for_model, arguments=item.arguments or "{}")
        call = ToolCall(id=item.call_id, type="function", function=function)
        return ChatMessage(role="assistant", content="", tool_calls=[call])
    if item.type == "function_call_output":
        return ChatMessage(role="tool", content=text_of(item.output), tool_call_id=item.call_id)
    if item.type == "item_reference":
        told = "nothing is stored here: send the item itself, as clients do for store: false"
        raise unsupported(name, f"{name} refers to an item, and {told}")
    if item.role is None:
        raise ApiError(f"{name} is a message and needs a role", param=name)
    return ChatMessage(role=item.role, content=text_of(item.content))


def _tools(body: ResponsePrompt) -> list[Tool] | None:
    named = named_functions(body.tools)
    return function_tools((name.for_model, tool.description, tool.parameters) for name, tool in named)


def _choice(body: ResponsePrompt) -> str | ToolChoice | None:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "function":
        return ToolChoice.of(required(choice.name, "tool_choice.name"))
    names = [tool.name for tool in required(choice.tools, "tool_choice.tools")]
    return ToolChoice.among(names, required(choice.mode, "tool_choice.mode"))


def _format(body: ResponseRequest) -> ResponseFormat | None:
    if body.text is None or body.text.format is None:
        return None
    wanted = body.text.format
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type, schema=wanted.schema_ if wanted.type == "json_object" else None)
    given = required(wanted.schema_, "text.format.schema")
    schema = JsonSchema.model_validate({"name": wanted.name or "answer", "schema": given})
    return ResponseFormat(type="json_schema", json_schema=schema)


def _format_map(body: ResponseRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    wanted = body.text.format.model_dump(by_alias=True, exclude_none=True)
    return {"name": "answer", **wanted} if wanted["type"] == "json_schema" else wanted


@dataclass
class ResponseReply:
    """Produces one reply, complete or as events."""

    gateway: Gateway
    body: ResponseRequest
    request_id: str
    model: str
    tools: ToolUse
    reasoning: Reasoning
    created: float = field(default_factory=time.time)
    message_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    def __post_init__(self) -> None:
        self.reasoning = self.reasoning.before(self.tools.parser)
        self._names = {name.for_model: name for name, _ in named_functions(self.body.tools)}
        packs = PACKED_REASONING in (self.body.include or ())
        self._writer, self._encoder = EventWriter(self.message_id, packs_reasoning=packs), EventEncoder()

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """With the same items as a stream would have."""
        [completion] = completions
        reader, tokens = AnswerReader(self.reasoning, self.tools), self.reasoning.content_tokens(self.gateway.words)
        logprobs = content_logprobs(self.gateway.words, tokens, completion) + tokens.flush()
        for _ in self._write(reader, reader.read(completion.text), logprobs, completion):
            pass  # only the resulting items are used
        return self.response(completion, self._writer.output)

    def _write(
        self, reader: AnswerReader, parts: Parts, logprobs: list[Any], end: Completion | None
    ) -> Iterator[Event]:
        """The events of these parts. Texts take the logprobs; at the ``end`` the closing events follow."""
        writer = self._writer
        for part in parts:
            if isinstance(part, Thought):
                yield from writer.thought(part.text)
            elif isinstance(part, str):
                taken, logprobs[:] = logprobs[:], []
                yield from writer.text(part, taken)
            else:
                yield from writer.call(call_item(reader, part, self._names.get(part.name, Named(part.name))))
        if end is not None:
            yield from writer.close(logprobs, is_whole=end.finish_reason != "length")

    def response(self, completion: Completion | None, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The response object; without a completion it is in progress."""
        body, is_cut = self.body, completion is not None and completion.finish_reason == "length"
        num_reasoning = 0 if completion is None else self._num_thoughts(completion.token_ids)
        defaults = self.gateway.sampling_defaults
        status = "in_progress" if completion is None else "incomplete" if is_cut else "completed"
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": int(self.created),
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.effort, "summary": None},
            "store": False,
            "temperature": defaults["temperature"] if body.temperature is None else body.temperature,
            "text": {"format": _format_map(body)},
            "tool_choice": body.model_dump(exclude_none=True).get("tool_choice", "auto"),
            "tools": [tool_map(tool) for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if completion is None else response_usage([completion], num_reasoning=num_reasoning),
            "metadata": body.metadata or {},
        }

    def _num_thoughts(self, token_ids: list[int]) -> int:
        return self.reasoning.num_tokens(self.gateway, [token_ids])

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        writer, reader = self._writer, AnswerReader(self.reasoning, self.tools)
        tokens = self.reasoning.content_tokens(self.gateway.words)
        encode = self._encoder.encode
        logprobs: list[Any] = []  # of tokens whose text has not been sent yet
        for name in ("created", "in_progress"):
            yield encode(writer.event(f"response.{name}", response=self.response(None, [])))
        async for _, piece in generation.pieces():
            end = piece if isinstance(piece, Completion) else None
            parts = reader.push(piece.text) if end is None else reader.flush()
            logprobs += content_logprobs(self.gateway.words, tokens, piece) if end is None else tokens.flush()
            for event in self._write(reader, parts, logprobs, end):
                yield encode(event)
            if end is not None:
                response = self.response(end, writer.output)
                yield encode(writer.event(f"response.{response['status']}", response=response))

    def failure_events(self, error: TriptychError) -> bytes:
        """The last event of a failed stream: the typed event, which includes the error map of other streams for clients
        that ignore types.
        """
        told = error_map(error)["error"]
        named = {name: told[name] for name in ("code", "message", "param")}
        return self._encoder.encode(self._writer.event("error", **named, error=told))


def call_item(reader: AnswerReader, call: Call, name: Named) -> dict[str, Any]:
    """A call as an item of the output."""
    call_map = reader.call_map(call)
    return {
        "id": f"fc_{uuid.uuid4().hex[:24]}", "type": "function_call", "call_id": call_map["id"], **name.to_wire(),
        "arguments": call.arguments, "status": "completed",
    }  # fmt: skip
