"""The outermost layer of every request: its id, its key, its size, and its line in the log. Pure ASGI."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config import is_known_key
from ..errors import ApiError, error_response
from ..state import Gateway
from .uploads import BodyRefused

logger = logging.getLogger(__name__)

PROBES = ("/health", "/ping", "/ready")  # need no key
OPEN_ROUTES = (*PROBES, "/")  # nor does the page itself; the data it shows needs one
QUIET_ROUTES = (*PROBES, "/metrics")  # requested every few seconds: logged at DEBUG
HEAD_ROUTES = (*OPEN_ROUTES, "/metrics", "/version", "/v1/models")  # monitors ask them for nothing but the status
ENDLESS_ROUTE = "/ui/events"  # always ended by its client
CLIENT_CLOSED = 499  # for log and metrics; the client is gone
MAX_ID_CHARS = 128
MAX_PATH_CHARS = 256  # in the log and in replies: a path may be as long as all headers, and needs no key
_ID_HEADERS = (b"x-request-id", b"request-id")  # of a reply, as OpenAI's and Anthropic's clients read them
_LINE = "%(method)s %(path)r %(status)s in %(duration_ms)s ms, %(x_request_id)s"
_LINE_OF_ANSWER = _LINE + ", %(request_id)r"


class Edge:
    """Wraps the application with access checks, counters and logging."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Served as without these slashes, which come from addresses that end with one: a redirect may lose the body.
        if (path := scope["path"]) != "/" and (path.endswith("/") or path.startswith("//")):
            scope = {**scope, "path": "/" + path.strip("/")}
        if scope["method"] == "HEAD" and scope["path"] in HEAD_ROUTES:
            scope = {**scope, "method": "GET"}  # the server still knows, and leaves the body out
        visit = _Visit(scope, receive, send, self._gateway)
        counters = self._gateway.counters
        counters.num_open += 1
        try:
            if (refusal := visit.refusal()) is not None:
                await error_response(refusal, path=scope["path"])(scope, visit.receive, visit.send)
            else:
                await self._app(scope, visit.receive, visit.send)
        finally:
            counters.num_open -= 1
            visit.close()


class _Visit:
    """One request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, gateway: Gateway) -> None:
        self._scope, self._receive, self._send, self._gateway = scope, receive, send, gateway
        self._began = time.monotonic()
        self._headers = Headers(scope=scope)
        given = self._headers.get("x-request-id", "")
        is_fit = 0 < len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable()
        self._id = given if is_fit else uuid.uuid4().hex
        self._num_bytes = 0
        self._has_body = False
        self._is_answered = self._has_left = False
        self._status = CLIENT_CLOSED
        scope.setdefault("state", {})["send_more"] = send

    def refusal(self) -> ApiError | None:
        """Why this request is not admitted; None if it is."""
        keys = self._gateway.api_keys.read()
        if keys and self._scope["path"] not in OPEN_ROUTES and not self._has_one_of(keys):
            return ApiError("no valid API key was given", status=401, code="invalid_api_key")
        if (encoding := self._headers.get("content-encoding", "identity")).lower() != "identity":
            text = f"the body is encoded as {encoding!r:.80}, which is not supported: send it without content-encoding"
            return ApiError(text, status=415, code="unsupported_encoding")
        length = self._headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > self._gateway.config.max_body_bytes:
            return self._too_large(int(length))
        return None

    def _has_one_of(self, keys: tuple[str, ...]) -> bool:
        """Anthropic's clients send ``x-api-key``, possibly beside a bearer token for another service."""
        scheme, _, token = self._headers.get("authorization", "").partition(" ")
        given = (token if scheme.lower() == "bearer" else "", self._headers.get("x-api-key", ""))
        # The raw bytes: header values are decoded as Latin-1, whatever their encoding.
        return any(is_known_key(key.strip().encode("latin-1"), keys) for key in given)

    def _too_large(self, num_bytes: int) -> ApiError:
        limit = self._gateway.config.max_body_bytes
        return ApiError(f"the body has {num_bytes} bytes, the limit is {limit}", status=413, code="body_too_large")

    async def receive(self) -> Message:
        if self._has_body:
            return self._seen(await self._receive())
        limit_s = self._gateway.config.body_timeout_s
        message = await self._gateway.uploads.receive(self._receive, began=self._began, limit_s=limit_s)
        self._num_bytes += len(message.get("body", b""))
        self._has_body = not message.get("more_body", False)
        if self._num_bytes > self._gateway.config.max_body_bytes:
            raise BodyRefused(self._too_large(self._num_bytes))
        return self._seen(message)

    def _seen(self, message: Message) -> Message:
        if message["type"] == "http.disconnect" and not self._is_answered:
            self._has_left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message.get("headers", ()), *((name, self._id.encode()) for name in _ID_HEADERS)]
        elif not message.get("more_body", False):
            self._is_answered = True
        await self._send(message)

    def close(self) -> None:
        del self._scope["state"]["send_more"]  # which refers to the scope: garbage that only a search would find
        seconds = time.monotonic() - self._began
        route = getattr(self._scope.get("route"), "path", "other")
        counters = self._gateway.counters
        counters.requests[route, str(self._status)] += 1
        counters.seconds[route] += seconds
        if route != ENDLESS_ROUTE:
            counters.num_disconnects += self._has_left or self._status == CLIENT_CLOSED
        extra: dict[str, Any] = {
            "method": self._scope["method"], "path": self._scope["path"][:MAX_PATH_CHARS], "status": self._status,
            "duration_ms": round(seconds * 1e3, 1), "x_request_id": self._id,
            "request_id": self._scope["state"].get("request_id"),
        }  # fmt: skip
        level = logging.DEBUG if route in QUIET_ROUTES else logging.INFO
        logger.log(level, _LINE if extra["request_id"] is None else _LINE_OF_ANSWER, extra)
