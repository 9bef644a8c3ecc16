"""Channels between workers drop messages rather than block, and always report that they did."""

from __future__ import annotations

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
    ZMQ,
    Bell,
    Inbox,
    Links,
    Outbox,
    Poller,
    inbox_endpoint,
    ipc_endpoint,
)
from triptych.protocol.codec import encode
from triptych.protocol.errors import ConfigError

Context = zmq.Context[zmq.Socket[bytes]]


def prepared(slot: int) -> m.Prepared:
    return m.Prepared(slot, 1, b"record")


def synchronized_inbox(context: Context, folder: Path) -> Inbox:
    """An inbox whose owner has already read the journal."""
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
    """Send ``(message, epoch, seq)`` triples, with gaps as if some messages were lost on the way."""
    socket = push_to(context, folder)
    for message, epoch, seq in frames:
        socket.send(encode(message, epoch=epoch, seq=seq))


# -- between the workers


def test_new_inbox_reports_missed_messages(context: Context, folder: Path) -> None:
    assert Inbox(context, inbox_endpoint(folder, "execute")).missed


def test_unused_inbox_is_known_to_be_empty(context: Context, folder: Path) -> None:
    assert synchronized_inbox(context, folder).recv_all() == []


def test_messages_arrive_in_order_and_none_is_missed(context: Context, folder: Path) -> None:
    inbox = synchronized_inbox(context, folder)
    outbox = Outbox(context, inbox_endpoint(folder, "execute"), epoch=1)
    first = eventually(lambda: outbox.send(prepared(0)))
    assert first
    received = receive(inbox, 1)
    inbox.missed = False  # the first ones may have been dropped before the connection was made
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
def test_gap_is_reported(context: Context, folder: Path, frames: list[tuple[Any, int, int]], missed: bool) -> None:
    inbox = synchronized_inbox(context, folder)
    send_frames(context, folder, *frames)
    assert receive(inbox, len(frames)) == [message for message, _, _ in frames]
    assert inbox.missed is missed


def test_gap_is_reported_once(context: Context, folder: Path) -> None:
    inbox = synchronized_inbox(context, folder)
    send_frames(context, folder, (prepared(0), 1, 3))
    receive(inbox, 1)
    inbox.missed = False
    send_frames(context, folder, (prepared(0), 1, 4))
    receive(inbox, 1)
    assert not inbox.missed


def test_invalid_frame_counts_as_missed(context: Context, folder: Path) -> None:
    inbox = synchronized_inbox(context, folder)
    push_to(context, folder).send(b"\xc1garbage")
    assert eventually(lambda: inbox.recv_all() or inbox.num_bad_frames) == 1
    assert inbox.missed


def test_send_without_a_receiver_returns_false_at_once(context: Context, folder: Path) -> None:
    outbox = Outbox(context, inbox_endpoint(folder, "nobody"), epoch=1)
    started = time.monotonic()
    assert not any(outbox.send(prepared(slot)) for slot in range(1000))
    assert time.monotonic() - started < 1


def test_messages_sent_without_a_receiver_show_as_a_gap(context: Context, folder: Path) -> None:
    outbox = Outbox(context, inbox_endpoint(folder, "execute"), epoch=1)
    assert not outbox.send(prepared(0))
    inbox = synchronized_inbox(context, folder)
    eventually(lambda: outbox.send(prepared(1)))
    assert receive(inbox, 1) == [prepared(1)]
    assert inbox.missed


def test_peer_that_does_not_read_costs_a_bounded_queue(context: Context, folder: Path) -> None:
    inbox = synchronized_inbox(context, folder)
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


def test_longest_possible_socket_path_is_accepted() -> None:
    path = Path("/" + "x" * (MAX_IPC_PATH - 1))
    assert ipc_endpoint(path) == f"ipc://{path}"


@pytest.mark.parametrize("name", ["x" * MAX_IPC_PATH, "é" * 54], ids=["characters", "bytes"])
def test_too_long_socket_path_is_refused_with_both_lengths(name: str) -> None:
    size = 1 + len(name.encode())
    with pytest.raises(ConfigError, match=f"has {size} bytes, the limit is 107"):
        ipc_endpoint(Path("/") / name)


def test_socket_in_a_missing_folder_is_a_config_error(context: Context, folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot bind ipc://"):
        Inbox(context, ipc_endpoint(folder / "missing" / "x"))


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


def test_bell_rings_until_it_is_silenced(bell: Bell) -> None:
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


def test_bell_ends_the_wait_of_another_thread(bell: Bell) -> None:
    waiter = threading.Thread(target=Poller(bell.file).wait, args=(60.0,))
    waiter.start()
    bell.ring()
    waiter.join(10)
    assert not waiter.is_alive()


def test_message_ends_a_wait(context: Context, folder: Path) -> None:
    inbox = synchronized_inbox(context, folder)
    send_frames(context, folder, (prepared(0), 1, 0))
    Poller(inbox.socket).wait(60.0)
    assert inbox.recv_all() == [prepared(0)]


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_wait_with_timeout_zero_only_polls(bell: Bell, timeout_s: float) -> None:
    Poller(bell.file).wait(timeout_s)


def test_lack_of_threads_is_an_error_and_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libzmq would, also the program that a driver or a client is part of."""
    started = list[threading.Thread]()
    start = threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(ConfigError, match="no thread can be started"):
        ZMQ.context()
    assert not started[0].is_alive()
