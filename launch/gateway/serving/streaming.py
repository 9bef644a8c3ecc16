"""Server-sent events, as plain bytes: their cost is paid for every token of every client."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....protocol.errors import RequestError, RequestTimeout, TriptychError
from ...terminal.json_lines import in_one_line
from ..errors import ClientGone, error_map

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
# Sent where there is nothing else to send for a while: proxies end connections that are silent, many after a minute,
# which a long prompt or a call that is sent when it is complete may take.
SILENCE_S = 15.0
COMMENT = b": keep-alive\n\n"
# In a stream with ids, OpenAI's client takes the empty line behind a comment for an event, which it cannot read.
COMMENT_AMONG_IDS = b": keep-alive\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # otherwise nginx would buffer events
# Nothing here contains itself; to check that takes a quarter of the time.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def to_json(content: Any) -> str:
    return in_one_line(_encode(content))


def event(content: Any, *, event_id: str | None = None, name: str | None = None) -> bytes:
    """One event. Browsers send ``event_id`` back as Last-Event-ID."""
    head = f"id: {event_id}\n" if event_id is not None else ""
    if name is not None:
        head += f"event: {name}\n"
    return f"{head}data: {to_json(content)}\n\n".encode()


def failure_events(error: TriptychError) -> bytes:
    """The last events of a failed stream."""
    return event(error_map(error)) + DONE


class EventStream(Response):
    """A response that sends what ``events`` yields. ``on_close`` is called once, however it ends."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        on_close: Callable[[], None],
        timeout_s: float | None,
        spent_s: float = 0.0,
        failure_events: Callable[[TriptychError], bytes] = failure_events,
        comment: bytes = COMMENT,
    ) -> None:
        """``spent_s``: the part of ``timeout_s`` already used. ``failure_events``: the end of a failed stream.
        ``comment``: what breaks a silence.
        """
        self.status_code, self.background = 200, None
        self.media_type = "text/event-stream"
        self.init_headers(_HEADERS)  # not the base's __init__, which would set a content-length
        self._events = events
        self._on_close = on_close
        self._timeout_s, self._spent_s = timeout_s, spent_s
        self._failure_events, self._comment = failure_events, comment
        self._has_sent = False  # since the last look
        self._is_sending = False  # for long only if the client does not read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # The layers between here and the server look at the start and at the last part. A call of each for every
            # token takes a tenth of the gateway's time.
            self._send_more = scope.get("state", {}).get("send_more", send)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(ClientGone):
                await unless_gone(receive, self._keep_alive(send))
        finally:
            self._on_close()

    async def _keep_alive(self, send: Send) -> None:
        breaking = asyncio.create_task(self._break_silence())
        try:
            await self._send_all(send)
        finally:
            breaking.cancel()

    async def _break_silence(self) -> None:
        while True:
            self._has_sent = False
            await asyncio.sleep(SILENCE_S)
            if not (self._has_sent or self._is_sending):
                await self._send_more({"type": "http.response.body", "body": self._comment, "more_body": True})

    async def _send_all(self, send: Send) -> None:
        try:
            with anyio.fail_after(_left_s(self._timeout_s, self._spent_s)):
                async for chunk in self._events:
                    self._has_sent = self._is_sending = True
                    await self._send_more({"type": "http.response.body", "body": chunk, "more_body": True})
                    self._is_sending = False
        except TimeoutError:
            await self._end(send, self._failure_events(late(self._timeout_s)))
        except TriptychError as error:
            await self._end(send, self._failure_events(error.with_traceback(None)))  # whose frames refer to it
        except Exception as error:  # the headers have been sent, so the error can only go into the stream
            logger.exception("a stream failed")
            told = RequestError(f"internal error: {type(error).__name__}")
            await self._end(send, self._failure_events(told))
        else:
            await self._end(send, b"")

    async def _end(self, send: Send, body: bytes) -> None:
        self._is_sending = True  # and after this nothing may be sent
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of ``work``; cancelled as soon as the client closes its connection.

    Raises:
        ClientGone: the client has disconnected.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def answered(request: Request, work: Awaitable[Any], *, timeout_s: float | None, spent_s: float = 0.0) -> Any:
    """The result of ``work``, for a reply that is not a stream. ``spent_s``: the part of ``timeout_s`` used before.

    Raises:
        ClientGone: the client has disconnected.
        RequestTimeout: it took longer than the gateway allows.
    """
    try:
        with anyio.fail_after(_left_s(timeout_s, spent_s)):
            return await unless_gone(request.receive, work)
    except TimeoutError as error:
        raise late(timeout_s) from error


def _left_s(timeout_s: float | None, spent_s: float) -> float | None:
    return None if timeout_s is None else max(0.0, timeout_s - spent_s)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def late(timeout_s: float | None) -> RequestTimeout:
    """The error for a client whose request took too long."""
    return RequestTimeout(f"the request was not answered within {timeout_s} s")
