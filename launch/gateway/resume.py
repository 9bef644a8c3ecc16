"""/v1/requests/{id}: an answer taken up again, by any gateway, whatever was restarted meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ...protocol.errors import DuplicateId
from .calls import ToolUse
from .chat import KIND as CHAT
from .chat import ChatReply
from .completions import KIND as COMPLETION
from .errors import ApiError, aborted, json_response
from .generation import Generation
from .replies import ChunkWriter, Head
from .state import Gateway
from .submission import Choices
from .usage import usage

_CHAT_TEXT = ('"delta":{"content":', '},"logprobs":null,"finish_reason":null')
_COMPLETION_TEXT = ('"text":', ',"logprobs":null,"finish_reason":null')


async def resume_request(
    gateway: Gateway, request: Request, request_id: str, *, offset: int | None, stream: bool, last_id: str | None
) -> ASGIApp:
    """The rest of an answer as a stream of chunks, or the whole of it in one reply.

    In a stream the text is as the model wrote it: calls of tools are read out of whole answers only.

    Raises:
        ApiError: 404, no request of this id is live or kept; 400, the offset is none.
    """
    kind, _, parser = request_id.partition("-")[0].partition(".")
    num_tokens = _offset(offset, last_id) if stream else 0
    request.state.request_id = request_id
    if kind not in (CHAT, COMPLETION) or await _state(gateway, request_id) == "unknown":
        raise _unknown(request_id)
    # A connection that is lost may not be known to be: whoever asks last reads.
    gateway.client.let_go(request_id, DuplicateId("another connection reads this answer now"))
    followed = gateway.client.resume(request_id, num_tokens=num_tokens, num_chars=None, keep=True)
    choices = Choices([followed])
    generation = Generation.resumed(gateway, request, choices)
    is_chat = kind == CHAT
    head = Head(request_id, ("chat.completion" if is_chat else "text_completion"), gateway.model_names[0])
    if not stream:
        reply = ChatReply(gateway, head, ToolUse(parser=parser or "none"))
        completions = await generation.results()
        if is_chat:
            return json_response(reply.whole(completions))
        [whole] = completions
        choice = {"index": 0, "text": whole.text, "logprobs": None, "finish_reason": whole.finish_reason}
        return json_response({**head.fields(), "choices": [choice], "usage": usage(completions)})
    return generation.stream(_events(generation, head, num_tokens, is_chat=is_chat))


async def forget_request(gateway: Gateway, request_id: str) -> Response:
    """End a request, and forget its answer once it has ended."""
    state = await _state(gateway, request_id)
    if state == "unknown":
        raise _unknown(request_id)
    if state in ("queued", "running"):
        gateway.client.let_go(request_id, aborted("the request was deleted"))
        stream = gateway.client.resume(request_id)
        stream.abort()
        await stream.result()
    else:
        gateway.client.forget(request_id)
    return json_response({"id": request_id, "object": "request.deleted", "deleted": True})


async def _events(generation: Generation, head: Head, num_tokens: int, *, is_chat: bool) -> AsyncIterator[bytes]:
    before, after = _CHAT_TEXT if is_chat else _COMPLETION_TEXT
    head = Head(head.request_id, "chat.completion.chunk" if is_chat else head.object, head.model, head.created)
    writer = ChunkWriter(head, before_text=before, after_text=after, with_usage=True, with_ids=True)
    async for piece in generation.pieces():
        if piece.end is None:
            num_tokens = piece.deltas[-1].num_tokens
            yield writer.text(0, "".join(delta.text for delta in piece.deltas), num_tokens=num_tokens)
            continue
        last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        choice = {"index": 0, **last, "logprobs": None, "finish_reason": piece.end.finish_reason}
        yield writer.choice(choice, num_tokens=num_tokens)
        yield writer.usage(usage([piece.end]))
    yield b"data: [DONE]\n\n"


def _offset(offset: int | None, last_id: str | None) -> int:
    if offset is not None or last_id is None:
        return offset or 0
    if not last_id.isascii() or not last_id.isdigit():
        raise ApiError(f"Last-Event-ID is {last_id!r:.80}, it must be a number of tokens", param="Last-Event-ID")
    return int(last_id)


async def _state(gateway: Gateway, request_id: str) -> str:
    """Where the request stands in the pipeline."""
    if not gateway.is_loaded:
        gateway.check_ready()
    return (await gateway.client.status(request_id)).state


def _unknown(request_id: str) -> ApiError:
    return ApiError(f"no request {request_id!r:.100} is live or kept", status=404, code="unknown_id")
