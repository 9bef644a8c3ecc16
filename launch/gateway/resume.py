"""/v1/requests/{id}: resumes an answer, from any gateway, whatever was restarted meanwhile."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ...driver.async_stream import AsyncStream
from ...driver.choices import choice_ids
from ...driver.stream import Delta
from ...protocol.board import FAILED
from ...protocol.errors import DuplicateId, PipelineFailed, RequestError
from ...protocol.sampling import MAX_SAMPLES
from .errors import ApiError, aborted, json_response
from .forms.calls import ToolUse, has_short_ids
from .openai.chat import KIND as CHAT
from .openai.chat import OBJECT as CHAT_OBJECT
from .openai.chat import ChatReply, Known
from .openai.completions import KIND as COMPLETION
from .openai.completions import OBJECT as COMPLETION_OBJECT
from .openai.completions import CompletionReply
from .reasoning.handling import Reasoning
from .requests.generation import Generation
from .requests.ids import read_id
from .requests.replies import Head
from .requests.submission import Choices
from .schemas.completions import CompletionRequest
from .schemas.sampling import StreamOptions
from .serving.streaming import answered
from .state import Gateway

POSITIONS = "^[0-9]{1,10}(,[0-9]{1,10})*$"  # a number for each choice


async def resume_request(
    gateway: Gateway, request: Request, request_id: str, *, known: str | None, stream: bool
) -> ASGIApp:
    """The rest of an answer as a stream of chunks, or the complete answer in one reply.

    ``known``: the number of tokens the client has of each choice, as in an event's id; None: none. Reasoning and tool
    calls are parsed as in the original reply.

    Raises:
        ApiError: 404, no request with this id is live or kept; 400, ``known`` is malformed.
    """
    kind, _, n, _ = read_id(request_id)
    positions = _positions(known if stream else None, n)
    request.state.request_id = request_id
    if kind not in (CHAT, COMPLETION) or n > MAX_SAMPLES or await _state(gateway, request_id) == "unknown":
        raise _unknown(request_id)
    # A lost connection may not have been noticed yet: the latest reader takes over.
    for name in {request_id, *choice_ids(request_id, n)}:
        gateway.client.detach(name, DuplicateId("another connection has taken over this answer"))
    reply = _reply(gateway, request_id, positions)
    if stream and isinstance(reply, ChatReply) and not reply.is_plain:
        reply.known = await _known(gateway, request, request_id, positions)
    generation = Generation.resumed(gateway, request, Choices(_follow(gateway, request_id, positions, keep=True)))
    return generation.stream(reply.events(generation)) if stream else await generation.reply(reply.whole)


def _reply(gateway: Gateway, request_id: str, positions: list[int]) -> ChatReply | CompletionReply:
    """The reply format of this answer, as far as its id tells."""
    kind, parser, n, thoughts = read_id(request_id)
    options, model = StreamOptions.model_validate({"include_usage": True}), gateway.model_names[0]
    if kind == CHAT:
        head = Head(request_id, CHAT_OBJECT, model)
        tools = ToolUse.of_id(parser, has_short_ids=has_short_ids(gateway))
        return ChatReply(
            gateway, head, tools, Reasoning.of_mark(thoughts),
            stream_options=options, with_ids=True, num_choices=n, positions=positions,
        )  # fmt: skip
    body = CompletionRequest.model_construct(prompt="", n=n, resumable=True, stream_options=options)
    return CompletionReply(gateway, Head(request_id, COMPLETION_OBJECT, model), body, positions)


async def forget_request(gateway: Gateway, request_id: str) -> Response:
    """Abort a request, or forget its answer if it has ended."""
    state = await _state(gateway, request_id)
    if state == "unknown":
        raise _unknown(request_id)
    if state in ("queued", "running"):
        n = read_id(request_id).num_choices
        for name in {request_id, *choice_ids(request_id, n)}:
            gateway.client.detach(name, aborted("the request was deleted"))
        streams = _follow(gateway, request_id, [0] * n, keep=False)
        for followed in streams:
            followed.abort()
        for followed in streams:
            await _end(followed)
    else:
        gateway.client.forget(request_id)
    return json_response({"id": request_id, "object": "request.deleted", "deleted": True})


async def _end(followed: AsyncStream) -> None:
    """Wait for the end of an answer, however it ends."""
    try:
        await followed.result()
    except PipelineFailed:  # the next driver may continue it
        raise
    except RequestError:
        pass


def _follow(gateway: Gateway, request_id: str, positions: list[int], *, keep: bool) -> list[AsyncStream]:
    """One stream per choice, from the client's position in it."""
    return [
        gateway.client.resume(name, num_tokens=position, num_chars=None, keep=keep)
        for name, position in zip(choice_ids(request_id, len(positions)), positions, strict=True)
    ]


async def _known(gateway: Gateway, request: Request, request_id: str, positions: list[int]) -> list[Known]:
    """The part that the client has of each choice: parsing the rest depends on it."""
    names = choice_ids(request_id, len(positions))

    async def read() -> list[Known]:
        return [await _take(gateway, name, position) for name, position in zip(names, positions, strict=True)]

    known: list[Known] = await answered(request, read(), timeout_s=gateway.config.request_timeout_s)
    return known


async def _take(gateway: Gateway, name: str, num_tokens: int) -> Known:
    if not num_tokens:
        return Known([], "")
    stream, ids, text = gateway.client.resume(name, keep=True), list[int](), ""
    try:
        while len(ids) < num_tokens and (deltas := await stream.take()):
            delta = Delta.joined(deltas)
            ids += delta.token_ids
            text += delta.text
    finally:
        stream.detach()
    return Known(ids[:num_tokens], text)


def _positions(known: str | None, num_choices: int) -> list[int]:
    if known is None:
        return [0] * num_choices
    if not re.fullmatch(POSITIONS, known):
        raise ApiError(f"Last-Event-ID is {known!r:.80}, it must be a token count per choice", param="Last-Event-ID")
    positions = [int(number) for number in known.split(",")]
    if len(positions) != num_choices:
        raise ApiError(
            f"offset has {len(positions)} numbers, it needs one for each of the answer's {num_choices} choices",
            param="offset",
        )
    return positions


async def _state(gateway: Gateway, request_id: str) -> str:
    """The state of the request in the pipeline.

    Raises:
        ApiError: 503, the state cannot be determined: the pipeline is not ready yet, or has failed and its successor
            may know the request.
    """
    if not gateway.is_loaded:
        gateway.check_ready()
    state = (await gateway.client.status(request_id)).state
    if state == "unknown" and gateway.board.mode == FAILED:
        gateway.check_ready()
    return state


def _unknown(request_id: str) -> ApiError:
    return ApiError(f"no request {request_id!r:.100} is live or kept", status=404, code="unknown_id")
