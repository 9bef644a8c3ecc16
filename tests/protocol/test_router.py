"""The public socket refuses what it cannot take, waits for no client, and bounds what each leaves unread."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from tests.waiting import eventually
from triptych.protocol import messages as m
from triptych.protocol.channels import Links, Router, ipc_endpoint, receive_limit
from triptych.protocol.codec import decode, encode
from triptych.protocol.unsent import MAX_UNSENT_BYTES, MIN_LARGE_BYTES

FRAME_LIMIT = 4096
LARGE = m.Info({"x": bytes(1 << 20)})
Context = zmq.Context[zmq.Socket[bytes]]


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
    with pytest.raises(ConnectionError, match="no client is connected as 6e6f626f6479"):
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
