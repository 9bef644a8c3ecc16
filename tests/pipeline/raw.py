"""A client of plain sockets and MessagePack, which does exactly what a test says and records all it receives."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgpack
import zmq

SUBMIT, GET_INFO, ACCEPTED, REJECTED, INFO = 1, 2, 3, 4, 5
FOLLOW, ABORT, ACKNOWLEDGE, GET_STATUS, GET_STATS = 10, 11, 12, 13, 14
TEXT, FINISHED, FAILED, STATUS, STATS = 20, 21, 22, 23, 24


class RawClient:
    """``received[endpoint]`` holds every frame as ``[tag, version, epoch, seq, ...fields]``, in order."""

    def __init__(
        self, run_dir: Path, *, receive_limit: int = 1000, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        """``context``: shared by many clients; its owner destroys it."""
        self._context = context or zmq.Context()
        self.sockets = {endpoint: self._connect(run_dir / endpoint, receive_limit) for endpoint in ("submit", "follow")}
        self.received: dict[str, list[list[Any]]] = {"submit": [], "follow": []}

    def _connect(self, path: Path, receive_limit: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, receive_limit)
        socket.connect(f"ipc://{path}")
        return socket

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def send(self, endpoint: str, tag: int, *fields: Any) -> None:
        self.sockets[endpoint].send(msgpack.packb([tag, 1, 0, 0, *fields]))

    def send_bytes(self, endpoint: str, *frames: bytes) -> None:
        self.sockets[endpoint].send_multipart(list(frames))

    def receive(self, endpoint: str, *tags: int, timeout: float = 20.0) -> list[Any]:
        """The next frame with one of the tags (any, if none is given); all frames are recorded."""
        deadline = time.monotonic() + timeout
        while self.sockets[endpoint].poll(max(0, int((deadline - time.monotonic()) * 1000))):
            frame = msgpack.unpackb(self.sockets[endpoint].recv(), strict_map_key=False)
            self.received[endpoint].append(frame)
            if not tags or frame[0] in tags:
                return list(frame)
        raise AssertionError(f"no {tags} at {endpoint} within {timeout} s; got {self.received[endpoint][-3:]}")

    def ask(self, endpoint: str, question: int, answer: int, *, timeout: float = 60.0) -> list[Any]:
        """The answer to a question, repeated each second: the service drops questions if its queue is full."""
        deadline = time.monotonic() + timeout
        while True:
            self.send(endpoint, question)
            try:
                return self.receive(endpoint, answer, timeout=1.0)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise

    def collect(self, endpoint: str, seconds: float) -> list[list[Any]]:
        """Receive for some time, to show that nothing else arrives."""
        before = len(self.received[endpoint])
        deadline = time.monotonic() + seconds
        while self.sockets[endpoint].poll(max(0, int((deadline - time.monotonic()) * 1000))):
            self.received[endpoint].append(msgpack.unpackb(self.sockets[endpoint].recv(), strict_map_key=False))
        return self.received[endpoint][before:]

    def submit(self, request_id: str | None = None, **request: Any) -> str:
        """Submit, expect ACCEPTED, and follow the answer from its beginning."""
        request_id = request_id or os.urandom(8).hex()
        self.send("submit", SUBMIT, request_id, request)
        tag, *_ = self.receive("submit", ACCEPTED, REJECTED)
        assert tag == ACCEPTED, self.received["submit"][-1]
        self.follow(request_id, 0)
        return request_id

    def follow(self, request_id: str, num_tokens: int, *, again: bool = False) -> None:
        self.send("follow", FOLLOW, [[request_id, num_tokens, again]])

    def ends(self, request_id: str) -> list[list[Any]]:
        """Every terminal message of this request so far."""
        return [f for f in self.received["follow"] if f[0] in (FINISHED, FAILED) and f[4] == request_id]
