"""A service under the test's control: the other side of the client, without a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zmq

from triptych.driver.session import Session
from triptych.driver.stream import Stream
from triptych.protocol import messages as m
from triptych.protocol.channels import Router, ipc_endpoint
from triptych.protocol.codec import decode
from triptych.protocol.connection import Address, Connection

M = TypeVar("M")
SOCKETS = ("submit", "follow")
REPEAT_S = 0.03  # used by the fixture fast_repeats


def packed(*token_ids: int) -> bytes:
    return np.array(token_ids, "<i4").tobytes()


def row(request_id: str, offset: int, *token_ids: int, text: str = "", text_offset: int = 0) -> m.DeltaRow:
    return [request_id, offset, text_offset, packed(*token_ids), text, None, None]


def finished(request_id: str, offset: int = 0, *token_ids: int, text: str = "", reason: str = "stop") -> m.Finished:
    return m.Finished(request_id, offset, 0, packed(*token_ids), text, None, reason, {"usage": {}})


def failed(request_id: str, code: str, message: str, offset: int = 0) -> m.Failed:
    return m.Failed(request_id, offset, 0, b"", "", None, code, message, {})


def has_entry(*entry: Any) -> Any:
    """A predicate: the FOLLOW has this entry."""
    return lambda follow: list(entry) in follow.entries


class FakeService:
    """Two public sockets in one folder. Client messages are received in the order in which the test asks for them."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._endpoints = {socket: ipc_endpoint(folder / socket) for socket in SOCKETS}
        self._routers: dict[str, Router] = {}
        self._peers: dict[str, bytes] = {}  # the last sender at each socket
        self.received: list[Any] = []  # all messages, also those that the test skipped
        for socket in SOCKETS:
            self.open_socket(socket)

    def open_socket(self, socket: str, *, epoch: int = 1) -> None:
        self._routers[socket] = Router(self._context, self._endpoints[socket], epoch=epoch, max_frame_bytes=1 << 20)

    def close_socket(self, socket: str) -> None:
        self._routers.pop(socket).socket.close(linger=0)

    def client(self) -> Session:
        return Session(self.connection()).start()

    def connection(self) -> Connection:
        return Connection(Address(self._endpoints["submit"], self._endpoints["follow"]))

    def recv(self, kind: type[M], *, timeout: float = 10.0, where: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of this kind; others before it are skipped."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            message = self.recv_any(0.05)
            if isinstance(message, kind) and where(message):
                return message
        raise AssertionError(f"no {kind.__name__} within {timeout} s")

    def recv_any(self, timeout: float) -> Any:
        """The next message on either socket; None after the timeout."""
        poller = zmq.Poller()
        for router in self._routers.values():
            poller.register(router.socket, zmq.POLLIN)
        poller.poll(int(timeout * 1000))
        for socket, router in self._routers.items():
            if (received := router.recv()) is not None:
                self._peers[socket] = received[0]
                self.received.append(decode(received[1]).message)
                return self.received[-1]
        return None

    def send(self, socket: str, message: Any) -> None:
        """Send to the last sender at this socket."""
        assert self._routers[socket].send(self._peers[socket], message)

    def accept(self, request_id: str) -> None:
        """Accept the request, and wait until its client follows it."""
        self.recv(m.Submit, where=lambda submit: submit.request_id == request_id)
        self.send("submit", m.Accepted(request_id, 1, 0, 16))
        self.recv(m.Follow, where=lambda follow: any(entry[0] == request_id for entry in follow.entries))

    def settle(self, session: Session) -> None:
        """Return when both sides have processed all earlier messages: a later request has ended."""
        submit(session, "last")
        self.accept("last")
        self.send("follow", finished("last"))
        self.recv(m.Acknowledge, where=lambda message: message.request_ids == ["last"])

    def close(self) -> None:
        self._context.destroy(linger=0)


def submit(session: Session, request_id: str = "a", **request: Any) -> Stream:
    stream = Stream(request_id, session)
    session.submit(request_id, request or {"prompt": "hello"}, stream)
    return stream
