"""Channels between workers drop rather than wait and never hide it; the public socket refuses what it cannot take."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.waiting import eventually
from triptych.protocol import messages as m
from triptych.protocol.channels import (
    MAX_IPC_PATH,
    Bell,
    Inbox,
    Links,
    Outbox,
    Poller,
    Router,
    inbox_endpoint,
    ipc_endpoint,
    receive_limit,
)
from triptych.protocol.codec import decode, encode
from triptych.protocol.errors import ConfigError
from triptych.protocol.unsent import MAX_UNSENT_BYTES, MIN_LARGE_BYTES

FRAME_LIMIT = 4096
Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def context() -> Iterator[Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def prepared(slot: int) -> m.Prepared:
    return m.Prepared(slot, 1, b"record")


def settled_inbox(context: Context, folder: Path) -> Inbox:
    """One that has read the journal already."""
    inbox = Inbox(context, inbox_endpoint(folder, "execute"))
    inbox.missed = False
    return inbox


def push_to(context: Context, folder: Path) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.connect(inbox_endpoint(folder, "execute"))
    return socket


def receive(inbox: Inbox, count: int) -> list[Any]:
    messages: list[Any] = []

    def enough() -> bool:
        messages.extend(inbox.recv_all())
        return len(messages) >= count

    eventually(enough)
    return messages


def send_frames(context: Context, folder: Path, *frames: tuple[Any, int, int]) -> None:
    """``(message, epoch, seq)`` as a sender that lost some on the way would have sent them."""
    socket = push_to(context, folder)
    for message, epoch, seq in frames:
        socket.send(encode(message, epoch=epoch, seq=seq))


# -- between the workers


def test_a_new_inbox_has_missed_everything(context: Context, folder: Path) -> None:
    assert Inbox(context, inbox_endpoint(folder, "execute")).missed


def test_an_inbox_nobody_wrote_to_is_empty_at_once(context: Context, folder: Path) -> None:
    assert settled_inbox(context, folder).recv_all() == []


def test_messages_arrive_in_order_and_nothing_is_missed(context: Context, folder: Path) -> None:
    inbox = settled_inbox(context, folder)
    outbox = Outbox(context, inbox_endpoint(folder, "execute"), epoch=1)
    first = eventually(lambda: outbox.send(prepared(0)))
    assert first
    received = receive(inbox, 1)
    inbox.missed = False  # the first ones may have been dropped before the connection stood
    for slot in range(1, 100):
        assert outbox.send(prepared(slot))
    assert received + receive(inbox, 99) == [prepared(slot) for slot in range(100)]
    assert not inbox.missed


@pytest.mark.parametrize(
    ("frames", "missed"),
    [
        ([(prepared(0), 1, 0), (prepared(1), 1, 1)], False),
        ([(prepared(0), 1, 0), (prepared(2), 1, 2)], True),
        ([(prepared(1), 1, 1)], True),
        ([(prepared(0), 1, 0), (prepared(0), 1, 0)], True),
        ([(prepared(0), 1, 0), (prepared(0), 2, 0)], True),
        ([(prepared(0), 1, 0), (prepared(1), 2, 1)], True),
        ([(prepared(0), 1, 5), (prepared(0), 2, 0), (prepared(1), 2, 1)], True),
        ([(prepared(0), 1, 0), (m.Release(b"", b""), 7, 0), (prepared(1), 1, 1)], False),
        ([(m.Release(b"", b""), 7, 0), (prepared(0), 1, 0), (m.Release(b"", b""), 7, 2)], True),
    ],
    ids=[
        "whole",
        "one lost",
        "first lost",
        "twice",
        "new life",
        "new life, first lost",
        "lost, then new life",
        "two senders",
        "one of two",
    ],
)
def test_a_gap_is_noticed(context: Context, folder: Path, frames: list[tuple[Any, int, int]], missed: bool) -> None:
    inbox = settled_inbox(context, folder)
    send_frames(context, folder, *frames)
    assert receive(inbox, len(frames)) == [message for message, _, _ in frames]
    assert inbox.missed is missed


def test_a_gap_is_noticed_once(context: Context, folder: Path) -> None:
    inbox = settled_inbox(context, folder)
    send_frames(context, folder, (prepared(0), 1, 3))
    receive(inbox, 1)
    inbox.missed = False
    send_frames(context, folder, (prepared(0), 1, 4))
    receive(inbox, 1)
    assert not inbox.missed


def test_a_frame_that_is_no_message_counts_as_missed(context: Context, folder: Path) -> None:
    inbox = settled_inbox(context, folder)
    push_to(context, folder).send(b"\xc1garbage")
    assert eventually(lambda: inbox.recv_all() or inbox.num_bad_frames) == 1
    assert inbox.missed


def test_a_send_to_nobody_returns_false_at_once(context: Context, folder: Path) -> None:
    outbox = Outbox(context, inbox_endpoint(folder, "nobody"), epoch=1)
    started = time.monotonic()
    assert not any(outbox.send(prepared(slot)) for slot in range(1000))
    assert time.monotonic() - started < 1


def test_what_was_sent_to_nobody_shows_as_a_gap(context: Context, folder: Path) -> None:
    outbox = Outbox(context, inbox_endpoint(folder, "execute"), epoch=1)
    assert not outbox.send(prepared(0))
    inbox = settled_inbox(context, folder)
    eventually(lambda: outbox.send(prepared(1)))
    assert receive(inbox, 1) == [prepared(1)]
    assert inbox.missed


def test_a_peer_that_does_not_read_costs_a_bounded_queue(context: Context, folder: Path) -> None:
    inbox = settled_inbox(context, folder)
    outbox = Outbox(context, inbox_endpoint(folder, "execute"), epoch=1)
    eventually(lambda: outbox.send(prepared(0)))
    results = [outbox.send(prepared(slot)) for slot in range(1, 20_000)]
    assert not results[-1]
    assert results.count(True) < 5000
    assert inbox.recv_all()


def test_links_carry_each_message_to_its_peer(folder: Path) -> None:
    execute = Links(folder, "execute", epoch=1, peers=("summarize",))
    prepare = Links(folder, "prepare", epoch=1, peers=("execute", "summarize"))
    try:
        eventually(lambda: prepare.send("execute", prepared(3)))
        assert receive(execute.inbox, 1) == [prepared(3)]
        assert not execute.send("summarize", prepared(3))
    finally:
        prepare.close()
        execute.close()


def test_a_path_as_long_as_a_socket_takes_is_taken() -> None:
    path = Path("/" + "x" * (MAX_IPC_PATH - 1))
    assert ipc_endpoint(path) == f"ipc://{path}"


@pytest.mark.parametrize("name", ["x" * MAX_IPC_PATH, "é" * 54], ids=["characters", "bytes"])
def test_a_path_too_long_for_a_socket_says_both_numbers(name: str) -> None:
    size = 1 + len(name.encode())
    with pytest.raises(ConfigError, match=f"has {size} bytes, the limit is 107"):
        ipc_endpoint(Path("/") / name)


def test_a_socket_in_a_folder_that_is_not_there_is_a_config_error(context: Context, folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot bind ipc://"):
        Inbox(context, ipc_endpoint(folder / "missing" / "x"))


# -- toward the clients


@pytest.fixture
def router(context: Context, folder: Path) -> Router:
    return Router(context, ipc_endpoint(folder / "submit"), epoch=3, max_frame_bytes=FRAME_LIMIT)


@pytest.fixture
def dealer(context: Context, router: Router) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RECONNECT_IVL, 5)
    socket.connect(router.endpoint)
    return socket


def test_a_client_is_answered(router: Router, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(encode(m.GetInfo()))
    peer, frame = eventually(router.recv)
    assert decode(frame).message == m.GetInfo()
    assert [router.send(peer, m.Info({"i": i})) for i in range(2)] == [True, True]
    assert [decode(dealer.recv()) for _ in range(2)] == [(m.Info({"i": i}), 3, i) for i in range(2)]


def test_nothing_to_receive_is_none(router: Router) -> None:
    assert router.recv() is None


@pytest.mark.parametrize("parts", [[b"", b"x"], [b"a", b"b", b"c"]], ids=["REQ", "three"])
def test_messages_of_several_frames_are_dropped_and_counted(
    router: Router, dealer: zmq.Socket[bytes], parts: list[bytes]
) -> None:
    dealer.send_multipart(parts)
    dealer.send(b"after")
    assert eventually(router.recv)[1] == b"after"
    assert router.num_bad_frames == 1


def test_a_frame_too_large_is_cut_off_and_its_sender_may_come_again(router: Router, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(bytes(FRAME_LIMIT + 1025))

    def heard_again() -> tuple[bytes, bytes] | None:
        dealer.send(b"small")
        return router.recv()

    assert eventually(heard_again)[1] == b"small"


def test_a_frame_too_large_does_not_disturb_others(context: Context, router: Router, dealer: zmq.Socket[bytes]) -> None:
    other = context.socket(zmq.DEALER)
    other.connect(router.endpoint)
    other.send(b"hello")
    peer = eventually(router.recv)[0]
    dealer.send(bytes(FRAME_LIMIT + 1025))
    for _ in range(50):
        assert router.send(peer, m.Info({}))
        other.recv()


def test_a_send_to_somebody_who_left_is_false(context: Context, router: Router, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(b"hello")
    peer = eventually(router.recv)[0]
    dealer.close(linger=0)
    eventually(lambda: not router.send(peer, m.Info({})))


def test_a_send_to_somebody_unknown_is_false(router: Router) -> None:
    assert not router.send(b"nobody", m.Info({}))


def test_who_left_is_told_from_who_does_not_read(router: Router, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(b"hello")
    peer = eventually(router.recv)[0]
    eventually(lambda: not router.deliver(peer, m.Info({"x": "y" * 1000})), interval=0)
    with pytest.raises(ConnectionError, match="nobody is connected as 6e6f626f6479"):
        router.deliver(b"nobody", m.Info({}))


def test_a_client_that_does_not_read_is_refused_and_not_waited_for(router: Router, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(b"hello")
    peer = eventually(router.recv)[0]
    eventually(lambda: not router.send(peer, m.Info({"x": "y" * 1000})), interval=0)


@pytest.fixture
def deaf(context: Context, router: Router) -> zmq.Socket[bytes]:
    """A client that says hello, and of which one message is enough until it reads."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.connect(router.endpoint)
    socket.send(b"hello")
    return socket


LARGE = m.Info({"x": bytes(1 << 20)})


def test_of_large_messages_few_wait_for_a_client_that_does_not_read(router: Router, deaf: zmq.Socket[bytes]) -> None:
    """ZeroMQ counts messages: a thousand of the largest are the memory of the machine."""
    peer = eventually(router.recv)[0]
    num_sent = sum(router.send(peer, LARGE) for _ in range(100))
    assert MAX_UNSENT_BYTES >> 20 <= num_sent <= (MAX_UNSENT_BYTES >> 20) + 8  # some are in the kernel, or the client
    assert not router.send(peer, m.Info({}))
    for _ in range(num_sent):
        deaf.recv()
    eventually(lambda: router.send(peer, LARGE))


def test_of_clients_that_took_their_large_messages_or_left_nothing_is_kept(context: Context, router: Router) -> None:
    for _ in range(200):
        with context.socket(zmq.DEALER) as socket:
            socket.connect(router.endpoint)
            socket.send(b"hello")
            peer = eventually(router.recv)[0]
            assert router.send(peer, m.Info({"x": bytes(MIN_LARGE_BYTES)}))
            socket.recv()
    assert len(router._unsent) <= 129


def test_numbers_count_what_was_sent_only(router: Router, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(b"hello")
    peer = eventually(router.recv)[0]
    router.send(b"nobody", m.Info({}))
    router.send(peer, m.Info({}))
    assert decode(dealer.recv()).seq == 0


def test_the_last_answers_leave_at_a_clean_end(context: Context, folder: Path) -> None:
    links = Links(folder, "prepare", epoch=1, peers=())
    router = links.router(ipc_endpoint(folder / "submit"), epoch=1, max_frame_bytes=FRAME_LIMIT)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(router.endpoint)
    dealer.send(b"hello")
    peer = eventually(router.recv)[0]
    num_sent = sum(router.send(peer, m.Info({"x": "y" * 10_000})) for _ in range(500))
    links.close()
    dealer.setsockopt(zmq.RCVTIMEO, 5000)
    assert num_sent == sum(bool(dealer.recv()) for _ in range(num_sent)) == 500


# -- waiting


@pytest.fixture
def bell() -> Iterator[Bell]:
    bell = Bell()
    yield bell
    bell.close()


def is_ringing(bell: Bell) -> bool:
    poller = zmq.Poller()
    poller.register(bell.file, zmq.POLLIN)
    return bool(poller.poll(0))


def test_a_bell_rings_until_it_is_silenced(bell: Bell) -> None:
    assert not is_ringing(bell)
    bell.ring()
    bell.ring()
    assert is_ringing(bell)
    bell.silence()
    assert not is_ringing(bell)


def test_silencing_a_silent_bell_is_harmless(bell: Bell) -> None:
    bell.silence()
    bell.ring()
    assert is_ringing(bell)


def test_a_bell_ends_the_wait_of_another_thread(bell: Bell) -> None:
    waiter = threading.Thread(target=Poller(bell.file).wait, args=(60.0,))
    waiter.start()
    bell.ring()
    waiter.join(10)
    assert not waiter.is_alive()


def test_a_message_ends_a_wait(context: Context, folder: Path) -> None:
    inbox = settled_inbox(context, folder)
    send_frames(context, folder, (prepared(0), 1, 0))
    Poller(inbox.socket).wait(60.0)
    assert inbox.recv_all() == [prepared(0)]


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_a_wait_without_time_is_a_look(bell: Bell, timeout_s: float) -> None:
    Poller(bell.file).wait(timeout_s)


@pytest.mark.parametrize(("max_frame_bytes", "limit"), [(1 << 10, 1000), (8 << 20, 16), (1 << 30, 4)])
def test_the_larger_a_frame_may_be_the_fewer_wait_to_be_read(max_frame_bytes: int, limit: int) -> None:
    """A thousand of eight megabytes were as many gigabytes of one client."""
    assert receive_limit(max_frame_bytes) == limit


def test_more_than_may_wait_arrives_all_the_same(context: Context, folder: Path) -> None:
    router = Router(context, ipc_endpoint(folder / "submit"), epoch=1, max_frame_bytes=1 << 30)
    client = context.socket(zmq.DEALER)
    client.connect(router.endpoint)
    for number in range(200):
        client.send(b"%d" % number)
    frames = [eventually(router.recv)[1] for _ in range(200)]
    assert frames == [b"%d" % number for number in range(200)]
