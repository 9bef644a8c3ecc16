"""A client's two sockets: what cannot leave yet waits here once, whatever becomes of the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.waiting import eventually
from triptych.protocol import messages as m
from triptych.protocol.channels import Connection, Router, ipc_endpoint
from triptych.protocol.codec import Frame, decode, encode

Context = zmq.Context[zmq.Socket[bytes]]
DOORS = ("submit", "follow")


@pytest.fixture
def connection(folder: Path) -> Iterator[Connection]:
    connection = Connection(ipc_endpoint(folder / "submit"), ipc_endpoint(folder / "follow"))
    yield connection
    connection.close()


def open_door(context: Context, folder: Path, door: str) -> Router:
    return Router(context, ipc_endpoint(folder / door), epoch=1, max_frame_bytes=1 << 20)


def heard(connection: Connection, router: Router) -> tuple[bytes, Frame]:
    """The next message that reaches the server, with the client's thread turning meanwhile."""

    def turn() -> tuple[bytes, bytes] | None:
        connection.wait(0.01)
        return router.recv()

    peer, frame = eventually(turn, interval=0)
    return peer, decode(frame)


def everything_heard(connection: Connection, router: Router) -> list[m.Abort]:
    """What was said until now, known to be all by a last word."""
    connection.queue("follow", "last", m.GetStats())
    said: list[m.Abort] = []
    while (message := heard(connection, router)[1].message) != m.GetStats():
        said.append(message)
    return said


@pytest.mark.parametrize("door", DOORS)
def test_a_message_waits_for_a_server_that_is_away(
    context: Context, folder: Path, connection: Connection, door: str
) -> None:
    connection.queue(door, "a", m.Abort("a"))
    assert connection.wait(0.05) == []
    router = open_door(context, folder, door)
    assert heard(connection, router)[1].message == m.Abort("a")


def test_a_message_is_delivered_once(context: Context, folder: Path, connection: Connection) -> None:
    connection.queue("follow", "a", m.Abort("a"))
    for _ in range(5):
        connection.wait(0.01)
    assert everything_heard(connection, open_door(context, folder, "follow")) == [m.Abort("a")]


def test_a_message_queued_again_replaces_the_one_that_waits(
    context: Context, folder: Path, connection: Connection
) -> None:
    for number in range(100):
        connection.queue("follow", "key", m.Abort(f"{number}"))
        connection.wait(0)
    assert everything_heard(connection, open_door(context, folder, "follow")) == [m.Abort("99")]


def test_messages_of_other_keys_keep_their_order(context: Context, folder: Path, connection: Connection) -> None:
    for number in (0, 1, 2, 1, 0):
        connection.queue("follow", number, m.Abort(f"{number}"))
    assert everything_heard(connection, open_door(context, folder, "follow")) == [m.Abort(n) for n in "012"]


def test_one_server_that_is_away_does_not_hold_up_the_other(
    context: Context, folder: Path, connection: Connection
) -> None:
    connection.queue("submit", "a", m.GetInfo())
    connection.queue("follow", "b", m.Abort("b"))
    assert everything_heard(connection, open_door(context, folder, "follow")) == [m.Abort("b")]


def test_answers_are_returned(context: Context, folder: Path, connection: Connection) -> None:
    router = open_door(context, folder, "submit")
    connection.queue("submit", "a", m.GetInfo())
    peer, _ = heard(connection, router)
    router.send(peer, m.Info({"a": 1}))
    router.send(peer, m.Info({"a": 2}))
    frames = eventually(lambda: connection.wait(1.0))
    while len(frames) < 2:
        frames += eventually(lambda: connection.wait(1.0))
    assert [frame.message for frame in frames] == [m.Info({"a": 1}), m.Info({"a": 2})]


def test_frames_that_are_no_message_are_dropped(context: Context, folder: Path, connection: Connection) -> None:
    router = open_door(context, folder, "submit")
    connection.queue("submit", "a", m.GetInfo())
    peer, _ = heard(connection, router)
    router.socket.send_multipart([peer, b"\xc1"])
    router.socket.send_multipart([peer, encode(m.Info({"a": 1}))])
    assert [frame.message for frame in eventually(lambda: connection.wait(1.0))] == [m.Info({"a": 1})]


def test_a_server_that_comes_back_is_spoken_to_again(context: Context, folder: Path, connection: Connection) -> None:
    router = open_door(context, folder, "follow")
    connection.queue("follow", "a", m.Abort("a"))
    heard(connection, router)
    router.socket.close(linger=0)
    again = open_door(context, folder, "follow")

    def asked_again() -> tuple[bytes, bytes] | None:  # what was sent into the end of the first life is lost
        connection.queue("follow", "b", m.Abort("b"))
        connection.wait(0.01)
        return again.recv()

    assert decode(eventually(asked_again, interval=0)[1]).message == m.Abort("b")


def test_a_wake_ends_the_wait_of_another_thread(connection: Connection) -> None:
    waiter = threading.Thread(target=connection.wait, args=(60.0,))
    waiter.start()
    connection.wake()
    waiter.join(10)
    assert not waiter.is_alive()


def test_a_wake_before_the_wait_ends_it_too(connection: Connection) -> None:
    connection.wake()
    assert connection.wait(60.0) == []


def test_an_idle_wait_ends_with_its_time(connection: Connection) -> None:
    assert connection.wait(0.0) == []
