"""Clients with keys: which of them the gatekeeper admits, and those on the network that vanish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq

from tests.lost_packets import connections_of, lose_packets, num_unconfirmed
from tests.ports import free_endpoint
from tests.waiting import eventually
from triptych.protocol import channels, connection, curve
from triptych.protocol import messages as m
from triptych.protocol.channels import Router, ipc_endpoint
from triptych.protocol.codec import encode
from triptych.protocol.connection import Address, Connection
from triptych.protocol.curve import CurveServer, arm_client, start_gatekeeper
from triptych.protocol.errors import ConfigError
from triptych.protocol.keys import ClientKeys, KeyPair
from triptych.protocol.unfinished import Unfinished


@pytest.fixture
def service(context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> Iterator[Service]:
    service = Service(context, ipc_endpoint(folder / "submit"))
    yield service
    service.gatekeeper.stop()


@pytest.fixture
def network_service(
    context: zmq.Context[zmq.Socket[bytes]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Service]:
    """On ``tcp://``, with everyone admitted, and soon told if the other side has vanished."""
    monkeypatch.setattr(channels, "Unfinished", partial(Unfinished, max_bytes=3 << 16, look_bytes=-1))
    monkeypatch.setattr(channels, "SILENCE_S", 1)
    monkeypatch.setattr(channels, "ASK_AGAIN_S", 1)
    monkeypatch.setattr(channels, "LOST_CLIENT_S", 0.2)
    monkeypatch.setattr(connection, "LOST_S", 0.2)
    service = Service(context, ipc_endpoint(folder / "submit"), network=free_endpoint())
    service.verdict = lambda _: True
    yield service
    service.gatekeeper.stop()


class Service:
    """A socket for holders of keys. A test changes ``verdict``, which is called with a key."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, network: str | None = None) -> None:
        self.endpoint, self.keys = network or endpoint, KeyPair.new()
        self.asked: list[str] = []
        self.verdict: Callable[[str], bool] = lambda _: False
        server = CurveServer(network, self.keys.secret, self._allows)
        self.gatekeeper = start_gatekeeper(context, server)
        self.router = Router(context, endpoint, epoch=1, max_frame_bytes=1 << 20, public=server)

    def _allows(self, key: str) -> bool:
        self.asked.append(key)
        return self.verdict(key)

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def client_keys(self) -> ClientKeys:
        pair = KeyPair.new()
        return ClientKeys("any", self.keys.public, pair.public, pair.secret)

    def connect(self) -> Connection:
        """A client that has something to say."""
        connection = Connection(Address(self.endpoint, self.endpoint, self.client_keys()))
        connection.queue("submit", "a", m.GetInfo())
        return connection

    def hear(self, connection: Connection) -> tuple[bytes, bytes]:
        def turn() -> tuple[bytes, bytes] | None:
            connection.wait(0.01)
            return self.router.recv()

        return eventually(turn, interval=0)

    def hears(self, connection: Connection) -> None:
        self.hear(connection)
        connection.close()


def test_after_a_key_that_could_not_be_looked_up_others_are_admitted(service: Service) -> None:
    def fail(_: str) -> bool:
        raise ConfigError("no key file client.json: Too many open files")

    service.verdict = fail
    first = service.connect()
    eventually(lambda: service.asked)
    service.verdict = lambda key: key != service.asked[0]
    service.hears(service.connect())
    first.close()


def test_client_whose_key_was_refused_is_heard_once_it_is_admitted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ alone would never try again: the client would be silent until it is started anew."""
    monkeypatch.setattr(curve, "REFUSED_S", 0.01)
    client = service.connect()
    eventually(lambda: len(service.asked) == 2)  # for each of its sockets
    service.verdict = lambda _: True
    service.hears(client)


def test_client_that_was_there_before_the_keys_is_heard_with_them(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side tries again after a handshake without keys."""
    monkeypatch.setattr(connection, "LOOK_AGAIN_S", 0.01)
    service.verdict = lambda _: True
    plain, keys = Address(service.endpoint, service.endpoint), service.client_keys()
    client = Connection(plain, look_up=lambda: plain._replace(keys=keys))
    client.queue("submit", "a", m.GetInfo())
    service.hears(client)


def test_what_has_arrived_from_the_network_does_not_count_as_a_message_without_an_end(network_service: Service) -> None:
    client, peers = network_service.connect(), set()
    for number in range(9):
        client.queue("submit", number, m.Submit(str(number), {"prompt": "x" * (1 << 16)}))
        peers.add(network_service.hear(client)[0])
        network_service.router.limit_unfinished()
    assert len(peers) == 1, "it was disconnected"
    client.close()


def test_client_whose_connection_was_forgotten_on_the_way_connects_again(network_service: Service) -> None:
    """As by a router that was restarted, or saw no packet for long: nothing tells either side."""
    client = network_service.connect()
    first, _ = network_service.hear(client)
    for file in connections_of(network_service.port):
        lose_packets(file)

    def is_heard_again() -> bool:
        client.queue("submit", "a", m.GetInfo())
        client.wait(0.01)
        return (received := network_service.router.recv()) is not None and received[0] != first

    assert eventually(is_heard_again, interval=0)
    client.close()


def test_silent_client_that_vanished_is_disconnected(network_service: Service) -> None:
    """As by a loss of power: its connection would stay open for ever."""
    with zmq.Context() as elsewhere, elsewhere.socket(zmq.DEALER) as client:
        arm_client(client, network_service.client_keys())
        client.setsockopt(zmq.RECONNECT_IVL, -1)
        client.connect(network_service.endpoint)
        client.send(encode(m.GetInfo(), seq=0))
        peer, _ = eventually(network_service.router.recv)
        assert network_service.router.deliver(peer, m.Info({}))
        eventually(lambda: not any(map(num_unconfirmed, connections_of(network_service.port))))
        for file in connections_of(network_service.port):
            lose_packets(file)
        eventually(lambda: not connections_of(network_service.port))
