"""Limits for connections that send nothing, or too much. uvicorn limits the time between two requests, but neither the
time nor the size of a request's headers: clients that connect and stay silent could use up all connections, and clients
that send endless headers all memory. It also loses the body of a request that offers another protocol, sends chunks to
clients that do not know them, and has one line for all that is not HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .foreign import foreign_protocol
from .until_close import until_close

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 1 << 16  # for headers that arrive in several pieces; h11 has such a limit, httptools does not
_TOO_LARGE = b"The headers have more than %d bytes." % MAX_HEAD_BYTES
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n\r\n%s" % (len(_TOO_LARGE), _TOO_LARGE)
)
_UPGRADE = re.compile(rb"^upgrade(?=[ \t]*:)", re.IGNORECASE | re.MULTILINE)


class TimeLimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type] # whichever of its two is installed
    """uvicorn's protocol, which closes a connection whose headers are not complete ``limit_s`` after it was opened or
    they began, or are larger than ``MAX_HEAD_BYTES``.
    """

    limit_s: float
    told: set[str]  # what the log has been told about clients that speak something else

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._until_headers: asyncio.TimerHandle | None = None
        self._is_in_head, self._num_head_bytes = False, 0
        self._is_before_body = self._is_new = True
        self._begun = b""  # of a line whose rest decides whether it is sent on
        self._answered: Any = None  # the request being answered, if httptools is installed
        self._look()

    def data_received(self, data: bytes) -> None:
        is_new, self._is_new = self._is_new, False
        if is_new and (spoken := foreign_protocol(data)) is not None:
            self._refuse(spoken)
            return
        was_in_head = self._is_in_head
        data, self._begun = self._begun + data, b""
        if self._is_before_body:
            data, self._begun = without_upgrade(data)
        if data:  # h11 takes none for the end
            super().data_received(data)
        if was_in_head and self._is_in_head:
            self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        self._look()

    def connection_lost(self, error: Exception | None) -> None:
        self._disarm()
        super().connection_lost(error)
        # uvicorn notifies only the latest request, which is not the one being answered if the client pipelines.
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = self._is_before_body = False
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0  # trailers may follow the last chunk

    def on_body(self, body: bytes) -> None:
        self._is_in_head = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head, self._is_before_body = False, True
        super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, until_close(app, cycle) if cycle.scope["http_version"] < "1.1" else app)

    def _look(self) -> None:
        cycle: Any = self.cycle  # of the last request whose headers arrived
        if cycle is not None and not cycle.response_complete:
            self._disarm()
        elif self._until_headers is None:
            self._until_headers = self.loop.call_later(self.limit_s, self._give_up)

    def _refuse(self, spoken: str) -> None:
        self._disarm()
        if spoken not in self.told:
            self.told.add(spoken)
            client = self.client[0] if self.client else "a client"
            logger.warning("refused a connection of %s, as any other of its kind: it speaks %s", client, spoken)
        self.send_400_response(f"This connection speaks {spoken}.")

    def _refuse_head(self) -> None:
        """Not with a reply if another one is being sent, or if these are trailers, whose request has its own."""
        if self._is_before_body and (self._answered is None or self._answered.response_complete):
            self.transport.write(_REFUSAL)
        self._give_up()

    def _give_up(self) -> None:
        self._disarm()
        if not self.transport.is_closing():
            self.transport.close()

    def _disarm(self) -> None:
        if self._until_headers is not None:
            self._until_headers.cancel()
            self._until_headers = None


def without_upgrade(data: bytes) -> tuple[bytes, bytes]:
    """The head of a request without its offer of another protocol, and what follows the head unchanged. Second, the end
    of an incomplete head that may be the beginning of such an offer.

    A server may ignore such an offer, which Java's client makes with every first request (HTTP/2, h2c), but httptools
    takes the request to have no body then, and its body to be in the other protocol.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    line = b"" if end else head[head.rfind(b"\n") + 1 :]
    begun = line if b"upgrade".startswith(line.lower()) else b""
    return _UPGRADE.sub(b"x-upgrade", head.removesuffix(begun)) + end + rest, begun


def impatient(limit_s: float) -> type[asyncio.Protocol]:
    """A class with this limit, as uvicorn instantiates its protocols itself."""
    return type("TimeLimitedProtocol", (TimeLimitedProtocol,), {"limit_s": limit_s, "told": set()})
