"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError, json_response
from .requests.chat_messages import wire_messages, wire_tools
from .requests.token_ids import chat_ids
from .schemas.chat import TemplateFields
from .schemas.other import DetokenizeRequest, TokenizeRequest
from .serving.long_json import long_json
from .state import Gateway


async def tokenize(gateway: Gateway, body: TokenizeRequest, request: Request) -> Response:
    """Ids of a text from the tokenizer in this process, those of a chat from the pipeline, which has the template."""
    gateway.ready_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("exactly one of prompt and messages is needed", param="prompt")
    if body.prompt is not None:
        for name in TemplateFields.model_fields:
            if getattr(body, name):
                raise ApiError(f"{name} applies to a chat: it needs messages", param=name)
    ids = None if body.messages is None else await _chat_ids(gateway, body, request)
    # A text of 8 MB takes seconds, too long to block the event loop, which would be taken for hung.
    return await asyncio.to_thread(_tokenized, gateway, body, ids)


def _tokenized(gateway: Gateway, body: TokenizeRequest, ids: list[int] | None) -> Response:
    if ids is None:
        ids = gateway.words.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": gateway.card.max_model_len, "tokens": ids}
    if body.return_token_strs:
        reply["token_strs"] = [gateway.words.raw(token_id) for token_id in ids]
    return Response(long_json(reply), media_type="application/json")


async def _chat_ids(gateway: Gateway, body: TokenizeRequest, request: Request) -> list[int]:
    assert body.messages is not None, "prompt or messages are given"
    template = gateway.facts.chat_template or ""
    wanted = {"messages": wire_messages(body.messages, template=template), **body.template_options(template)}
    if body.tools:
        wanted["tools"] = wire_tools(body.tools)
    return await chat_ids(gateway, request, wanted)


async def detokenize(gateway: Gateway, body: DetokenizeRequest) -> Response:
    gateway.ready_model(body.model)
    return await asyncio.to_thread(_restored, gateway, body)


def _restored(gateway: Gateway, body: DetokenizeRequest) -> Response:
    limit = gateway.card.vocab_size - 1
    for index, token_id in enumerate(body.tokens):
        if not 0 <= token_id <= limit:
            raise ApiError(f"tokens[{index}] is {token_id}, the limits are 0 and {limit}", param=f"tokens[{index}]")
    text = gateway.words.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return json_response({"prompt": text})
