"""Sockets that lose, delay and reorder messages as ZeroMQ was observed to.

Sent messages that are not read yet are in flight. When one end of a connection goes away, messages to it are lost, and
of its own messages a part arrives; the other end reconnects after a while, and until then a send is refused
(IMMEDIATE). Within one connection order is kept; between two, even of the same peers, it is not. Nothing is doubled.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from triptych.protocol.channels import Transport

if TYPE_CHECKING:
    from tests.simulation.processes import Process

RECONNECT_NS = (100_000, 60_000_000)
DELAYS_NS = ((10_000, 2_000_000), (10_000, 2_000_000), (1_000_000, 60_000_000))  # near, near, far
LONG_DELAY_NS = 120_000_000
AGAIN = zmq.Again()
POLLIN, POLLOUT, EVENTS = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.EVENTS)
BOUND = (zmq.PULL, zmq.ROUTER)


class Pipe:
    """One direction of one connection: the messages in flight, oldest first, and their arrival times."""

    __slots__ = ("frames", "identity", "key", "reader")

    def __init__(self, reader: FakeSocket, identity: bytes, key: str) -> None:
        self.reader, self.identity = reader, identity
        self.key = key  # name of the connecting end, if it is a client
        self.frames: deque[tuple[int, bytes]] = deque()


class Connection:
    """From one connecting socket (PUSH, DEALER) to one that is bound (PULL, ROUTER)."""

    def __init__(self, network: Network, client: FakeSocket, server: FakeSocket) -> None:
        self.identity = next(network.identities).to_bytes(5, "big")
        self.client, self.server = client, server
        key = getattr(client.process, "key", "")
        self.up, self.down = Pipe(server, self.identity, key), Pipe(client, self.identity, key)
        self.is_open = True
        self.limit = network.rng.choice((3, 1000, 1000, 1000))  # sends to a peer that reads slowly are refused early


class Network:
    """All sockets of one run, and the random numbers for their delays."""

    def __init__(self, rng: random.Random, now_ns: Any) -> None:
        self.rng = rng
        self.now_ns = now_ns
        self.identities = itertools.count(1)
        self.bound: dict[str, FakeSocket] = {}
        self.connecting: list[FakeSocket] = []  # PUSH and DEALER, connected or waiting for it
        self._delay_ns = rng.choice(DELAYS_NS)
        self._is_slow = rng.random() < 0.3  # some frames take very long

    def delay_ns(self) -> int:
        if self._is_slow and self.rng.random() < 0.03:
            return LONG_DELAY_NS
        return self.rng.randrange(*self._delay_ns)

    def bind(self, socket: FakeSocket) -> None:
        assert socket.endpoint not in self.bound, f"{socket.endpoint} is bound twice"
        self.bound[socket.endpoint] = socket
        for other in self.connecting:
            if other.endpoint == socket.endpoint:
                other.connect_later()

    def drop(self, connection: Connection, *, dead: FakeSocket | None) -> None:
        """A connection breaks, because one end died or by itself; the connecting end reconnects if it lives."""
        if not connection.is_open:
            return
        connection.is_open = False
        for pipe in (connection.up, connection.down):
            if pipe.reader is dead:
                pipe.frames.clear()
            else:
                self._cut(pipe)
        connection.client.connection = None
        connection.server.connections.pop(connection.identity, None)
        if connection.client is not dead:
            connection.client.connect_later()

    def _cut(self, pipe: Pipe) -> None:
        """Of the messages in flight, only the first ones arrive. Those that arrived already stay."""
        now_ns = self.now_ns()
        num_arrived = sum(at <= now_ns for at, _ in pipe.frames)
        keep = self.rng.randrange(num_arrived, len(pipe.frames) + 1)
        while len(pipe.frames) > keep:
            pipe.frames.pop()
        if pipe.frames and pipe not in pipe.reader.leftovers:
            pipe.reader.leftovers.append(pipe)


class FakeFrame(NamedTuple):
    """A frame with the name of its sender."""

    bytes: bytes
    key: str

    def get(self, name: str) -> str:
        assert name == "User-Id", "no other property is used"
        return self.key


class FakeSocket:
    """The part of a pyzmq socket that ``channels`` and ``connection`` in ``protocol/`` use."""

    def __init__(self, network: Network, process: Process, kind: int) -> None:
        self.network, self.process = network, process
        self._is_bound = kind in BOUND
        self.endpoint = ""
        self.connections: dict[bytes, Connection] = {}  # of a bound socket
        self.connection: Connection | None = None  # of a connecting one
        self.leftovers: list[Pipe] = []  # of closed connections: messages that arrived and were not read
        self.connect_at_ns = 0
        process.sockets.append(self)

    def setsockopt(self, option: int, value: Any) -> None:
        pass

    def bind(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.network.bind(self)

    def connect(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.network.connecting.append(self)
        self.connect_later()

    def connect_later(self) -> None:
        self.connect_at_ns = self.network.now_ns() + self.network.rng.randrange(*RECONNECT_NS)
        self.process.wake(self.connect_at_ns)

    def close(self, linger: int = 0) -> None:
        """As the kernel does for a dead process."""
        for connection in [*self.connections.values(), *([self.connection] if self.connection else [])]:
            self.network.drop(connection, dead=self)
        if self.network.bound.get(self.endpoint) is self:
            del self.network.bound[self.endpoint]
        if self in self.network.connecting:
            self.network.connecting.remove(self)

    # -- sending

    def send(self, frame: bytes, flags: int = 0) -> None:
        self.process.act("send")
        connection = self._connected()
        if connection is None:
            raise AGAIN.with_traceback(None)
        self._put(connection, connection.up, frame)

    def send_multipart(self, parts: list[bytes], flags: int = 0) -> None:
        self.process.act("send")
        identity, frame = parts
        connection = self.connections.get(identity)
        if connection is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self._put(connection, connection.down, frame)

    def _put(self, connection: Connection, pipe: Pipe, frame: bytes) -> None:
        if len(pipe.frames) >= connection.limit:
            raise AGAIN.with_traceback(None)
        at_ns = self.network.now_ns() + self.network.delay_ns()
        if pipe.frames:
            at_ns = max(at_ns, pipe.frames[-1][0])
        pipe.frames.append((at_ns, frame))
        pipe.reader.process.wake(at_ns)

    def _connected(self) -> Connection | None:
        if self.connection is None and self.network.now_ns() >= self.connect_at_ns:
            server = self.network.bound.get(self.endpoint)
            if server is not None:
                self.connection = Connection(self.network, self, server)
                server.connections[self.connection.identity] = self.connection
        return self.connection

    # -- receiving

    def get(self, option: int) -> int:
        assert option == EVENTS, "no other option is used"
        at_ns = self.next_arrival_ns()
        return POLLIN if at_ns is not None and at_ns <= self.network.now_ns() else 0

    def recv(self, flags: int = 0) -> bytes:
        return self._take()[1]

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        pipe, frame = self._take()
        return [part if copy else FakeFrame(part, pipe.key) for part in (pipe.identity, frame)]

    def _pipes(self) -> list[Pipe]:
        if self._is_bound:
            return [*(c.up for c in self.connections.values()), *self.leftovers]
        return [self.connection.down, *self.leftovers] if self.connection else self.leftovers

    def _take(self) -> tuple[Pipe, bytes]:
        self.process.act("recv")
        now_ns = self.network.now_ns()
        ready = [pipe for pipe in self._pipes() if pipe.frames and pipe.frames[0][0] <= now_ns]
        if not ready:
            raise AGAIN.with_traceback(None)
        pipe = ready[0] if len(ready) == 1 else self.network.rng.choice(ready)
        _, frame = pipe.frames.popleft()
        if not pipe.frames and pipe in self.leftovers:
            self.leftovers.remove(pipe)
        return pipe, frame

    def next_arrival_ns(self) -> int | None:
        """When there is a message to read: in the past if there is one already."""
        return min([pipe.frames[0][0] for pipe in self._pipes() if pipe.frames], default=None)

    def can_send(self) -> bool:
        connection = self._connected()
        return connection is not None and len(connection.up.frames) < connection.limit


class FakePoller:
    """Never waits: it records when the waiting process is to continue."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._sockets: dict[Any, int] = {}

    def register(self, socket: Any, flags: int) -> None:
        self._sockets[socket] = int(flags)

    def poll(self, timeout_ms: int) -> list[tuple[Any, int]]:
        process = self._process
        now_ns = process.network.now_ns()
        process.next_ns = now_ns + timeout_ms * 1_000_000
        ready = []
        for socket, flags in self._sockets.items():
            if not isinstance(socket, FakeSocket):
                continue
            at_ns = socket.next_arrival_ns()
            if at_ns is not None:
                process.next_ns = min(process.next_ns, at_ns)
            is_ready = at_ns is not None and at_ns <= now_ns
            if is_ready or (flags & POLLOUT and socket.can_send()):
                ready.append((socket, flags))
                process.next_ns = now_ns
            elif flags & POLLOUT and socket.connection is None:
                process.next_ns = min(process.next_ns, max(socket.connect_at_ns, now_ns + 1_000_000))
        return ready


class FakeBell:
    """A bell that is never rung, because waits are simulated."""

    file = -1

    def ring(self) -> None: ...

    def silence(self) -> None: ...

    def close(self) -> None: ...


class FakeContext:
    def __init__(self, process: Process) -> None:
        self._process = process

    def socket(self, kind: int) -> FakeSocket:
        return FakeSocket(self._process.network, self._process, kind)

    def destroy(self, linger: int | None = None) -> None:
        self._process.close_sockets()


class FakeTransport(Transport):
    """A ``Transport`` of one process. Its sockets are closed with it."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def context(self) -> Any:
        return FakeContext(self.process)

    def poller(self) -> Any:
        return FakePoller(self.process)

    def bell(self) -> Any:
        return FakeBell()
