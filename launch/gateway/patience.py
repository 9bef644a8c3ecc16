"""Connections that say nothing, or too much. uvicorn bounds the time between two requests and not the time that a
request's headers take, nor their size, so whoever opens connections and is silent would keep all there are, and whoever
sends headers without an end all memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEAD_BYTES = 1 << 16  # of a request, when they come in several pieces; h11 has such a limit, httptools has none


class Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type] # whichever of its two is installed
    """uvicorn's protocol, closing a connection whose headers are not there ``limit_s`` after it, or they, began, or
    that are larger than ``MAX_HEAD_BYTES``.
    """

    limit_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._until_headers: asyncio.TimerHandle | None = None
        self._is_in_head, self._num_head_bytes = False, 0
        self._answered: Any = None  # the request that is being answered, if httptools is installed
        self._look()

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head:
            self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._give_up()
        self._look()

    def connection_lost(self, error: Exception | None) -> None:
        self._disarm()
        super().connection_lost(error)
        # uvicorn tells the request that came last, which waits if the client did not wait for the answer before.
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0  # behind the last chunk there may be headers too

    def on_body(self, body: bytes) -> None:
        self._is_in_head = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = False
        super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _look(self) -> None:
        cycle: Any = self.cycle  # of the last request whose headers came
        if cycle is not None and not cycle.response_complete:
            self._disarm()
        elif self._until_headers is None:
            self._until_headers = self.loop.call_later(self.limit_s, self._give_up)

    def _give_up(self) -> None:
        self._disarm()
        if not self.transport.is_closing():
            self.transport.close()

    def _disarm(self) -> None:
        if self._until_headers is not None:
            self._until_headers.cancel()
            self._until_headers = None


def impatient(limit_s: float) -> type[asyncio.Protocol]:
    """The class with this limit: uvicorn makes its protocols itself."""
    return type("Impatient", (Impatient,), {"limit_s": limit_s})
