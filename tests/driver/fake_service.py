"""A service that does what a test tells it, turn by turn: the client's other side without a pipeline."""

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
from triptych.protocol.channels import Connection, Router, ipc_endpoint
from triptych.protocol.codec import decode

M = TypeVar("M")
DOORS = ("submit", "follow")
REPEAT_S = 0.03  # of an impatient client


def packed(*token_ids: int) -> bytes:
    return np.array(token_ids, "<i4").tobytes()


def row(request_id: str, offset: int, *token_ids: int, text: str = "", text_offset: int = 0) -> m.DeltaRow:
    return [request_id, offset, text_offset, packed(*token_ids), text, None, None]


def finished(request_id: str, offset: int = 0, *token_ids: int, text: str = "", reason: str = "stop") -> m.Finished:
    return m.Finished(request_id, offset, 0, packed(*token_ids), text, None, reason, {"usage": {}})


def failed(request_id: str, code: str, message: str, offset: int = 0) -> m.Failed:
    return m.Failed(request_id, offset, 0, b"", "", None, code, message, {})


def has_entry(*entry: Any) -> Any:
    """Whether a FOLLOW has this entry."""
    return lambda follow: list(entry) in follow.entries


class FakeService:
    """Two public sockets in one folder. What the client says is heard in the order in which it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._endpoints = {door: ipc_endpoint(folder / door) for door in DOORS}
        self._routers: dict[str, Router] = {}
        self._peers: dict[str, bytes] = {}  # who spoke last at each door
        self.heard: list[Any] = []  # everything, also what nobody asked for
        for door in DOORS:
            self.open(door)

    def open(self, door: str) -> None:
        self._routers[door] = Router(self._context, self._endpoints[door], epoch=1, max_frame_bytes=1 << 20)

    def shut(self, door: str) -> None:
        self._routers.pop(door).socket.close(linger=0)

    def client(self) -> Session:
        return Session(Connection(*self._endpoints.values())).start()

    def hear(self, kind: type[M], *, timeout: float = 10.0, where: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of this kind; what else is said until then is passed over."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            message = self.hear_any(0.05)
            if isinstance(message, kind) and where(message):
                return message
        raise AssertionError(f"no {kind.__name__} within {timeout} s")

    def hear_any(self, timeout: float) -> Any:
        """The next message on either socket; None if nothing is said for so long."""
        poller = zmq.Poller()
        for router in self._routers.values():
            poller.register(router.socket, zmq.POLLIN)
        poller.poll(int(timeout * 1000))
        for door, router in self._routers.items():
            if (received := router.recv()) is not None:
                self._peers[door] = received[0]
                self.heard.append(decode(received[1]).message)
                return self.heard[-1]
        return None

    def say(self, door: str, message: Any) -> None:
        """To whoever spoke last at this door."""
        assert self._routers[door].send(self._peers[door], message)

    def accept(self, request_id: str) -> None:
        """Take the request, and have its client follow it."""
        self.hear(m.Submit, where=lambda submit: submit.request_id == request_id)
        self.say("submit", m.Accepted(request_id, 1, 0, 16))
        self.hear(m.Follow, where=lambda follow: any(entry[0] == request_id for entry in follow.entries))

    def settle(self, session: Session) -> None:
        """Return when all that was told to either side has been done, known by a request that comes after it."""
        submit(session, "last")
        self.accept("last")
        self.say("follow", finished("last"))
        self.hear(m.Acknowledge, where=lambda said: said.request_ids == ["last"])

    def close(self) -> None:
        self._context.destroy(linger=0)


def submit(session: Session, request_id: str = "a", **request: Any) -> Stream:
    stream = Stream(request_id, session.abort)
    session.submit(request_id, request or {"prompt": "hello"}, stream)
    return stream
