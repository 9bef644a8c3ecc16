"""A client that sends frames without the end of a message is disconnected before they fill the memory."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.waiting import eventually
from triptych.protocol.unfinished import Unfinished

MORE, LARGE, COMMAND = 1, 2, 4  # flags of a frame, ZMTP 3.0 (ZeroMQ RFC 23)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
CHUNK = 100_000
Context = zmq.Context[zmq.Socket[bytes]]
Connect = Callable[..., socket.socket]


def frame(body: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BQ", flags | LARGE, len(body)) + body


class Server:
    """A socket that accepts anyone, and what it has read."""

    def __init__(self, context: Context) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.unfinished = Unfinished(self.port, max_bytes=10 * CHUNK, look_bytes=-1)
        self._handshakes = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def await_handshake(self) -> None:
        """libzmq disconnects who sends more once it has written its own part, but not noticed that it was the last."""
        assert self._handshakes.poll(20_000), "no handshake"
        recv_monitor_message(self._handshakes)

    def read(self) -> bytes:
        assert self.socket.poll(20_000), "nothing arrives"
        last = self.socket.recv_multipart(copy=False)[-1]
        self.unfinished.note_message(last.get(zmq.SRCFD))
        return last.bytes

    def limit(self) -> bool:
        self.unfinished.limit()
        return True


@pytest.fixture
def server(context: Context) -> Server:
    return Server(context)


@pytest.fixture
def connect(server: Server) -> Iterator[Connect]:
    connections = []

    def connect(host: str = "127.0.0.1") -> socket.socket:
        connections.append(socket.create_connection(("127.0.0.1", server.port), timeout=20, source_address=(host, 0)))
        connections[-1].sendall(GREETING + frame(READY, COMMAND))
        server.await_handshake()
        return connections[-1]

    yield connect
    for connection in connections:
        connection.close()


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
        return True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_connection_without_the_end_of_a_message_is_closed(
    server: Server, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect()
    connection.sendall(frame(bytes(CHUNK), MORE) * 11)
    with caplog.at_level(logging.WARNING):
        eventually(lambda: server.limit() and is_closed(connection))
    assert "without the end of a message" in caplog.text


def test_messages_that_are_ended_do_not_count(server: Server, connect: Connect) -> None:
    connection = connect()
    for _ in range(3):
        for _ in range(6):
            connection.sendall(frame(bytes(CHUNK)))
            server.read()
        server.limit()
    assert not is_closed(connection)


def test_others_stay_connected_when_one_is_closed(server: Server, connect: Connect) -> None:
    endless, slow = connect(), connect()
    slow.sendall(frame(bytes(CHUNK))[:-1])
    endless.sendall(frame(bytes(CHUNK), MORE) * 10)
    eventually(lambda: server.limit() and is_closed(endless))
    slow.setblocking(True)
    slow.sendall(b"x")
    assert server.read()[-1:] == b"x"


def test_host_with_many_connections_is_not_spared_for_one_with_a_large_message(
    server: Server, connect: Connect
) -> None:
    large = connect("127.0.0.2")
    large.sendall(frame(bytes(3 * CHUNK))[:-1])
    many = [connect() for _ in range(5)]
    for connection in many:
        connection.sendall(frame(bytes(2 * CHUNK), MORE))
    eventually(lambda: server.limit() and any(map(is_closed, many)))
    large.setblocking(True)
    large.sendall(b"x")
    assert server.read()[-1:] == b"x"


def test_no_connection_is_looked_at_until_the_process_has_grown(server: Server, connect: Connect) -> None:
    server.unfinished = Unfinished(server.port, max_bytes=0, look_bytes=1 << 30)
    connection = connect()
    connection.sendall(frame(bytes(CHUNK), MORE))
    server.limit()
    assert not is_closed(connection)


def test_look_leaves_no_descriptor_open(server: Server, connect: Connect) -> None:
    connect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        server.limit()
    assert len(os.listdir("/proc/self/fd")) == before
