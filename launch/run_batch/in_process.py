"""Calls the gateway's application without a server."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from ..gateway.errors import ApiError, error_response, unreadable_body, unsupported
from .lines import Line, Reply

logger = logging.getLogger(__name__)


async def post(app: ASGIApp, line: Line) -> Reply:
    """The reply to the line's request, or its refusal. Cancelling this aborts the request."""
    if line.body.get("stream"):
        return _refusal(line, unsupported("stream", "stream is true, but answers of a batch are not streamed"))
    try:
        visit = _Visit(json.dumps(line.body).encode())
    except RecursionError as error:  # the line was read with less on the stack
        return _refusal(line, unreadable_body(error))
    try:
        await app(_scope(line.url, len(visit.body)), visit.receive, visit.send)
    except Exception as error:  # a bug of ours, which has already been answered with a 500
        if not visit.is_answered:
            raise
        logger.error("request %r failed", line.custom_id, exc_info=error)
    return visit.reply()


def _refusal(line: Line, error: ApiError) -> Reply:
    response = error_response(error, path=line.url)
    return Reply(response.status_code, "", json.loads(bytes(response.body)))


def _scope(path: str, num_bytes: int) -> Scope:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % num_bytes)]
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
        "client": None, "server": None,
    }  # fmt: skip


class _Visit:
    """The client's end of one request: it sends its body, then waits for the answer."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self._has_sent = False
        self._status, self._request_id = 0, ""
        self._parts: list[bytes] = []

    @property
    def is_answered(self) -> bool:
        return self._status != 0

    async def receive(self) -> Message:
        if self._has_sent:
            await asyncio.Event().wait()  # it never disconnects
        self._has_sent = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._request_id = dict(message["headers"]).get(b"x-request-id", b"").decode()
        else:
            self._parts.append(message.get("body", b""))

    def reply(self) -> Reply:
        body: Any = json.loads(b"".join(self._parts))
        return Reply(self._status, self._request_id, body)
