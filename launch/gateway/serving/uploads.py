"""The bodies of requests, as they arrive: they may take a limited time, and a stop does not wait for them."""

from __future__ import annotations

import time

import anyio
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from ..errors import ApiError


class BodyRefused(HTTPException):
    """Raised from ``receive``, where the framework passes only an ``HTTPException`` on unchanged."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.http_status, error.message)
        self.error = error


class Uploads:
    """Every wait for a part of a body, in one event loop."""

    def __init__(self) -> None:
        self._waiting: set[anyio.CancelScope] = set()
        self._is_stopping = False

    async def receive(self, receive: Receive, *, began: float, limit_s: float) -> Message:
        """The next message of a request that ``began`` at this monotonic time.

        Raises:
            BodyRefused: it did not arrive within ``limit_s``, or before the stop.
        """
        with anyio.move_on_after(max(0.0, began + limit_s - time.monotonic())) as scope:
            self._waiting.add(scope)
            try:
                if self._is_stopping:
                    scope.cancel()  # what is there already is still received
                return await receive()
            finally:
                self._waiting.discard(scope)
        if self._is_stopping:
            text = "the server is stopping and waits for no more of the body, send the request again"
            raise BodyRefused(ApiError(text, status=503, code="draining"))
        raise BodyRefused(ApiError(f"the body did not arrive within {limit_s} s", status=408, code="body_timeout"))

    def stop(self) -> None:
        """Refuse all requests whose bodies are not complete: their clients may take their time."""
        self._is_stopping = True
        for scope in self._waiting:
            scope.cancel()
