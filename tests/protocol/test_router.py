"""The public socket refuses what it cannot accept, waits for no client, and limits what each leaves unread."""

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


def test_client_gets_a_reply(router: Router, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(encode(m.GetInfo()))
    peer, frame = eventually(router.recv)
    assert decode(frame).message == m.GetInfo()
    assert [router.send(peer, m.Info({"i": i})) for i in range(2)] == [True, True]
    assert [decode(dealer.recv()) for _ in range(2)] == [(m.Info({"i": i}), 3, i) for i in range(2)]


def test_recv_without_a_message_returns_none(router: Router) -> None:
    assert router.recv() is None


@pytest.mark.parametrize("parts", [[b"", b"x"], [b"a", b"b", b"c"]], ids=["REQ", "three"])
def test_multipart_messages_are_dropped_and_counted(
    router: Router, dealer: zmq.Socket[bytes], parts: list[bytes]
) -> None:
    dealer.send_multipart(parts)
    dealer.send(b"after")
    assert eventually(router.recv)[1] == b"after"
    assert router.num_bad_frames == 1


def test_sender_of_an_oversized_frame_is_disconnected_and_may_reconnect(
    router: Router, dealer: zmq.Socket[bytes]
) -> None:
    dealer.send(bytes(FRAME_LIMIT + 1025))

    def answered_again() -> tuple[bytes, bytes] | None:
        dealer.send(b"small")
        return router.recv()

    assert eventually(answered_again)[1] == b"small"


def test_oversized_frame_does_not_disturb_others(context: Context, router: Router, dealer: zmq.Socket[bytes]) -> None:
    other = context.socket(zmq.DEALER)
    other.connect(router.endpoint)
    other.send(b"hello")
    peer = eventually(router.recv)[0]
    dealer.send(bytes(FRAME_LIMIT + 1025))
    for _ in range(50):
        assert router.send(peer, m.Info({}))
        other.recv()


def test_send_to_a_disconnected_client_returns_false(
    context: Context, router: Router, dealer: zmq.Socket[bytes]
) -> None:
    dealer.send(b"hello")
    peer = eventually(router.recv)[0]
    dealer.close(linger=0)
    eventually(lambda: not router.send(peer, m.Info({})))


def test_send_to_an_unknown_client_returns_false(router: Router) -> None:
    assert not router.send(b"nobody", m.Info({}))


def test_disconnected_client_is_distinguished_from_one_that_does_not_read(
    router: Router, dealer: zmq.Socket[bytes]
) -> None:
    dealer.send(b"hello")
    peer = eventually(router.recv)[0]
    eventually(lambda: not router.deliver(peer, m.Info({"x": "y" * 1000})), interval=0)
    with pytest.raises(ConnectionError, match="no client is connected as 6e6f626f6479"):
        router.deliver(b"nobody", m.Info({}))


def test_client_that_does_not_read_is_refused_and_not_waited_for(router: Router, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(b"hello")
    peer = eventually(router.recv)[0]
    eventually(lambda: not router.send(peer, m.Info({"x": "y" * 1000})), interval=0)


@pytest.fixture
def non_reading_client(context: Context, router: Router) -> zmq.Socket[bytes]:
    """A client that connects and reads nothing, with room for one message."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.connect(router.endpoint)
    socket.send(b"hello")
    return socket


def test_few_large_messages_wait_for_a_client_that_does_not_read(
    router: Router, non_reading_client: zmq.Socket[bytes]
) -> None:
    """ZeroMQ counts messages: a thousand of the largest would fill the machine's memory."""
    peer = eventually(router.recv)[0]
    num_sent = sum(router.send(peer, LARGE) for _ in range(100))
    assert (
        MAX_UNSENT_BYTES >> 20 <= num_sent <= (MAX_UNSENT_BYTES >> 20) + 8
    )  # some are in the kernel, or in the client
    assert not router.send(peer, m.Info({}))
    for _ in range(num_sent):
        non_reading_client.recv()
    eventually(lambda: router.send(peer, LARGE))


def test_nothing_is_kept_of_clients_that_read_their_large_messages_or_left(context: Context, router: Router) -> None:
    for _ in range(200):
        with context.socket(zmq.DEALER) as socket:
            socket.connect(router.endpoint)
            socket.send(b"hello")
            peer = eventually(router.recv)[0]
            assert router.send(peer, m.Info({"x": bytes(MIN_LARGE_BYTES)}))
            socket.recv()
    assert len(router._unsent) <= 129


def test_seq_counts_only_sent_messages(router: Router, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(b"hello")
    peer = eventually(router.recv)[0]
    router.send(b"nobody", m.Info({}))
    router.send(peer, m.Info({}))
    assert decode(dealer.recv()).seq == 0


def test_last_replies_are_sent_at_a_clean_stop(context: Context, folder: Path) -> None:
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
def test_larger_frame_limit_allows_fewer_unread_frames(max_frame_bytes: int, limit: int) -> None:
    """A thousand frames of eight megabytes would be gigabytes from a single client."""
    assert receive_limit(max_frame_bytes) == limit


def test_more_frames_than_the_queue_holds_still_arrive(context: Context, folder: Path) -> None:
    router = Router(context, ipc_endpoint(folder / "submit"), epoch=1, max_frame_bytes=1 << 30)
    client = context.socket(zmq.DEALER)
    client.connect(router.endpoint)
    for number in range(200):
        client.send(b"%d" % number)
    frames = [eventually(router.recv)[1] for _ in range(200)]
    assert frames == [b"%d" % number for number in range(200)]
