"""/v1/messages: chats in the format of Anthropic's Messages API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ....driver.stream import Completion, Delta
from ..answer import AnswerReader
from ..errors import json_response, message_error_map
from ..forms.calls import ToolUse, tool_use
from ..openai.chat import chat_request, chat_tools
from ..reasoning.handling import Reasoning, can_limit, with_reasoning
from ..requests.generation import Generation
from ..requests.parameters import named_as
from ..requests.token_ids import num_chat_tokens
from ..requests.usage import message_usage
from ..schemas.messages import CountRequest, MessageRequest
from ..serving.streaming import event
from ..state import Gateway
from .blocks import BlockWriter, blocks_of
from .turns import chat_of

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def create_message(gateway: Gateway, body: MessageRequest, request: Request) -> ASGIApp:
    """The reply, complete or as a stream of typed events.

    Raises:
        TriptychError: the request was refused.
    """
    model = gateway.ready_model(body.model)
    chat = chat_of(body, gateway.facts.chat_template or "")
    if chat.thinking_token_budget is not None and not await can_limit(gateway):
        chat.thinking_token_budget = None  # a target, not a limit
    tools = await chat_tools(gateway, chat)
    form = "tools" if tools.is_forced else "output_format" if body.output_format else "output_config.format"
    with named_as(prompt="messages", stop="stop_sequences", structured=form):
        wanted, reasoning = await with_reasoning(gateway, request, chat_request(gateway, chat, tools), chat)
        reply = MessageReply(gateway, f"msg_{uuid.uuid4().hex}", model, tools, reasoning)
        generation = await Generation.begin(gateway, request, reply.message_id, [wanted], model=model)
        if body.stream:
            return generation.stream(
                reply.events(generation), failure_events=lambda error: event(message_error_map(error), name="error")
            )
        return await generation.reply(reply.whole)


async def count_tokens(gateway: Gateway, body: CountRequest, request: Request) -> Response:
    """The number of tokens in the prompt that the model would get."""
    gateway.ready_model(body.model)
    chat = chat_of(body, gateway.facts.chat_template or "")
    tools = tool_use(gateway, chat.tools, chat.tool_choice, single=False)
    num_tokens = await num_chat_tokens(gateway, request, chat_request(gateway, chat, tools))
    return json_response({"input_tokens": num_tokens})


@dataclass
class MessageReply:
    """Produces one reply, complete or as events."""

    gateway: Gateway
    message_id: str
    model: str
    tools: ToolUse
    reasoning: Reasoning

    def __post_init__(self) -> None:
        self.reasoning = self.reasoning.before(self.tools.parser)

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        [completion] = completions
        reader = AnswerReader(self.reasoning, self.tools)
        blocks = blocks_of(reader.read(completion.text), reader)
        return self._message(blocks, **_stop(reader, completion), usage=self._usage(completion))

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        reader = AnswerReader(self.reasoning, self.tools)
        writer = BlockWriter(reader)
        usage = {"input_tokens": generation.num_prompt_tokens, "output_tokens": 0}  # cached tokens are not known yet
        message = self._message([], stop_reason=None, stop_sequence=None, usage=usage)
        yield writer.event("message_start", message=message)
        async for _, piece in generation.pieces():
            if isinstance(piece, Delta):
                for chunk in writer.parts(reader.push(piece.text)):
                    yield chunk
                continue
            for chunk in (*writer.parts(reader.flush()), *writer.close()):
                yield chunk
            yield writer.event("message_delta", delta=_stop(reader, piece), usage=self._usage(piece))
        yield writer.event("message_stop")

    def _message(self, blocks: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        head = {"id": self.message_id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": blocks, **fields}

    def _usage(self, completion: Completion) -> dict[str, Any]:
        return message_usage(completion, num_reasoning=self.reasoning.num_tokens(self.gateway, [completion.token_ids]))


def _stop(reader: AnswerReader, completion: Completion) -> dict[str, Any]:
    """The stop reason and the matching stop sequence."""
    reason, matched = reader.finish_reason(completion.finish_reason), completion.summary.get("matched")
    if reason == "stop" and isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}
