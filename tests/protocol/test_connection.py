"""A client's two sockets: messages that cannot be sent yet are queued, one per key, until the server is there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.waiting import eventually
from triptych.protocol import messages as m
from triptych.protocol.channels import Router, ipc_endpoint
from triptych.protocol.codec import Frame, decode, encode
from triptych.protocol.connection import Address, Connection
from triptych.protocol.errors import ConfigError

Context = zmq.Context[zmq.Socket[bytes]]
ENDPOINTS = ("submit", "follow")


@pytest.fixture
def connection(folder: Path) -> Iterator[Connection]:
    connection = Connection(Address(ipc_endpoint(folder / "submit"), ipc_endpoint(folder / "follow")))
    yield connection
    connection.close()


def open_router(context: Context, folder: Path, endpoint: str) -> Router:
    return Router(context, ipc_endpoint(folder / endpoint), epoch=1, max_frame_bytes=1 << 20)


def recv_next(connection: Connection, router: Router) -> tuple[bytes, Frame]:
    """The next message that reaches the server; the client's thread runs meanwhile."""

    def turn() -> tuple[bytes, bytes] | None:
        connection.wait(0.01)
        return router.recv()

    peer, frame = eventually(turn, interval=0)
    return peer, decode(frame)


def recv_all(connection: Connection, router: Router) -> list[m.Abort]:
    """All messages sent until now, delimited by a last message."""
    connection.queue("follow", "last", m.GetStats())
    messages: list[m.Abort] = []
    while (message := recv_next(connection, router)[1].message) != m.GetStats():
        messages.append(message)
    return messages


@pytest.mark.parametrize(
    ("endpoint", "why"), [("localhost:5555", "Invalid argument"), (f"ipc:///{'x' * 200}", "File name too long")],
    ids=["malformed", "too long"],
)  # fmt: skip
def test_endpoint_that_cannot_be_connected_is_named_and_leaves_nothing_open(
    folder: Path, endpoint: str, why: str
) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=f"cannot connect to '{endpoint[:50]}.*: {why}"):
        Connection(Address(ipc_endpoint(folder / "submit"), endpoint))
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_message_waits_for_an_absent_server(
    context: Context, folder: Path, connection: Connection, endpoint: str
) -> None:
    connection.queue(endpoint, "a", m.Abort("a"))
    assert connection.wait(0.05) == []
    router = open_router(context, folder, endpoint)
    assert recv_next(connection, router)[1].message == m.Abort("a")


def test_message_is_delivered_once(context: Context, folder: Path, connection: Connection) -> None:
    connection.queue("follow", "a", m.Abort("a"))
    for _ in range(5):
        connection.wait(0.01)
    assert recv_all(connection, open_router(context, folder, "follow")) == [m.Abort("a")]


def test_message_with_the_same_key_replaces_the_queued_one(
    context: Context, folder: Path, connection: Connection
) -> None:
    for number in range(100):
        connection.queue("follow", "key", m.Abort(f"{number}"))
        connection.wait(0)
    assert recv_all(connection, open_router(context, folder, "follow")) == [m.Abort("99")]


def test_messages_with_different_keys_keep_their_order(context: Context, folder: Path, connection: Connection) -> None:
    for number in (0, 1, 2, 1, 0):
        connection.queue("follow", number, m.Abort(f"{number}"))
    assert recv_all(connection, open_router(context, folder, "follow")) == [m.Abort(n) for n in "012"]


def test_absent_server_does_not_delay_the_other_one(context: Context, folder: Path, connection: Connection) -> None:
    connection.queue("submit", "a", m.GetInfo())
    connection.queue("follow", "b", m.Abort("b"))
    assert recv_all(connection, open_router(context, folder, "follow")) == [m.Abort("b")]


def test_answers_are_returned(context: Context, folder: Path, connection: Connection) -> None:
    router = open_router(context, folder, "submit")
    connection.queue("submit", "a", m.GetInfo())
    peer, _ = recv_next(connection, router)
    router.send(peer, m.Info({"a": 1}))
    router.send(peer, m.Info({"a": 2}))
    frames = eventually(lambda: connection.wait(1.0))
    while len(frames) < 2:
        frames += eventually(lambda: connection.wait(1.0))
    assert [frame.message for frame in frames] == [m.Info({"a": 1}), m.Info({"a": 2})]


def test_invalid_frames_are_dropped(context: Context, folder: Path, connection: Connection) -> None:
    router = open_router(context, folder, "submit")
    connection.queue("submit", "a", m.GetInfo())
    peer, _ = recv_next(connection, router)
    router.socket.send_multipart([peer, b"\xc1"])
    router.socket.send_multipart([peer, encode(m.Info({"a": 1}))])
    assert [frame.message for frame in eventually(lambda: connection.wait(1.0))] == [m.Info({"a": 1})]


def test_messages_reach_a_server_that_was_restarted(context: Context, folder: Path, connection: Connection) -> None:
    router = open_router(context, folder, "follow")
    connection.queue("follow", "a", m.Abort("a"))
    recv_next(connection, router)
    router.socket.close(linger=0)
    again = open_router(context, folder, "follow")

    def send_again() -> tuple[bytes, bytes] | None:  # what was sent while the first server closed is lost
        connection.queue("follow", "b", m.Abort("b"))
        connection.wait(0.01)
        return again.recv()

    assert decode(eventually(send_again, interval=0)[1]).message == m.Abort("b")


def test_wake_ends_the_wait_of_another_thread(connection: Connection) -> None:
    waiter = threading.Thread(target=connection.wait, args=(60.0,))
    waiter.start()
    connection.wake()
    waiter.join(10)
    assert not waiter.is_alive()


def test_wake_before_the_wait_ends_it_too(connection: Connection) -> None:
    connection.wake()
    assert connection.wait(60.0) == []


def test_wait_without_events_ends_at_its_timeout(connection: Connection) -> None:
    assert connection.wait(0.0) == []
