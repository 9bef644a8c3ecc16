"""ZeroMQ: only this module, ``connection`` and ``curve`` import it.

Between workers: PUSH to a PULL inbox in the run directory. A message may be lost together with the process it was sent
to, and a send never blocks: a worker that missed something reads the journal. Towards clients: ROUTER, configured to
report a peer that cannot take a message instead of dropping the message.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import zmq

from .codec import Frame, decode, encode
from .curve import CurveServer, Socket, arm_server, start_gatekeeper
from .errors import BadFrame, ConfigError
from .keep_alive import ASK_AGAIN_S, NUM_QUESTIONS, SILENCE_S
from .threads import start_thread
from .unfinished import Unfinished
from .unsent import MIN_LARGE_BYTES, Unsent

MAX_IPC_PATH = 107  # bytes, sun_path of a Unix socket
SEND_LIMIT = 1000  # messages in flight to one peer
# Unread input allowed per connection. ZeroMQ counts messages, so the limit assumes the largest ones; a queue of sixteen
# is received as fast as one of a thousand. Anything beyond it waits on the client's side.
MAX_UNREAD_BYTES = 128 << 20
MIN_UNREAD = 4
BACKLOG = 1024  # connections waiting to be accepted
LOST_CLIENT_S = 60.0  # until a client on the network that confirms nothing it was sent is disconnected
CONTEXT_THREADS = 2  # of ZeroMQ, for a context's sockets
MAX_OWNERS = 1 << 14  # connections whose key is remembered

POLLIN = zmq.POLLIN
# As plain ints: zmq's flags are Enum members, whose operators cost more than the calls they are passed to.
_READ, _EVENTS, _NO_WAIT, _SOURCE = int(zmq.POLLIN), int(zmq.EVENTS), int(zmq.NOBLOCK), int(zmq.SRCFD)


def ipc_endpoint(path: Path) -> str:
    """The endpoint of a socket at this path.

    Raises:
        ConfigError: the path is too long for a Unix socket, or no text, as ZeroMQ wants it.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the socket path {str(path)!r} is not UTF-8: choose another --run-dir") from error
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        text = f"the socket path {path} has {len(os.fsencode(path))} bytes, the limit is {MAX_IPC_PATH}"
        raise ConfigError(f"{text}: choose a shorter --run-dir")
    return f"ipc://{path}"


def inbox_name(role: str) -> str:
    """Of a worker's socket for the other workers, in the run directory."""
    return f"{role}.inbox"


def inbox_endpoint(run_dir: Path, role: str) -> str:
    return ipc_endpoint(run_dir / inbox_name(role))


def _bind(socket: Socket, endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"cannot bind {endpoint}: {error.strerror}") from error


def watch_network(socket: Socket, *, lost_s: float) -> None:
    """Let connections of ``tcp://`` end whose other side has vanished: after ``lost_s`` in which it confirmed nothing,
    or about a minute if there is nothing to confirm. Without this, one end would wait for a quarter of an hour, or for
    ever, for a host that lost its power, or behind a router that forgot the connection.

    It is the kernel that asks and confirms, so a process that is busy or stopped is not lost, nor is one on a slow
    line, where ZeroMQ's own heartbeats would wait behind a long prompt.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, SILENCE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, ASK_AGAIN_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, NUM_QUESTIONS)
    socket.setsockopt(zmq.TCP_MAXRT, milliseconds(lost_s))


def has_message(socket: Socket) -> bool:
    """Whether a message can be received without waiting. Asking first costs half as much as a failed receive."""
    return bool(int(socket.get(_EVENTS)) & _READ)


def receive_limit(max_frame_bytes: int) -> int:
    """How many messages of one client may wait to be read."""
    return min(max(MAX_UNREAD_BYTES // max_frame_bytes, MIN_UNREAD), SEND_LIMIT)


class Transport:
    """Makes sockets, pollers and bells; the simulation in tests/ has one without ZeroMQ."""

    def context(self) -> zmq.Context[Socket]:
        """
        Raises:
            ConfigError: it could not start its threads.
        """
        _check_threads()
        return zmq.Context(io_threads=1)

    def poller(self) -> zmq.Poller:
        return zmq.Poller()

    def bell(self) -> Bell:
        return Bell()


ZMQ = Transport()


def _check_threads() -> None:
    """Start as many threads as a context does, which ends the whole process if it cannot start them.

    Raises:
        ConfigError: that is not possible.
    """
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, daemon=True) for _ in range(CONTEXT_THREADS)]
    try:
        for thread in threads:
            start_thread(thread)
    finally:
        done.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


class Links:
    """A worker's inbox and its channels to the other workers."""

    def __init__(
        self, run_dir: Path, role: str, *, epoch: int, peers: tuple[str, ...], transport: Transport = ZMQ
    ) -> None:
        self._transport = transport
        self._context = transport.context()
        self._gatekeeper: Any = None
        self.inbox = Inbox(self._context, inbox_endpoint(run_dir, role))
        self._outboxes = {peer: Outbox(self._context, inbox_endpoint(run_dir, peer), epoch) for peer in peers}

    def router(self, endpoint: str, *, epoch: int, max_frame_bytes: int, public: CurveServer | None = None) -> Router:
        """A socket for clients; with ``public`` also on ``tcp://``, for clients on its list of keys."""
        if public is not None:
            self._gatekeeper = start_gatekeeper(self._context, public)
        return Router(self._context, endpoint, epoch=epoch, max_frame_bytes=max_frame_bytes, public=public)

    def poller(self, *others: Socket | int) -> Poller:
        """Waits for the inbox or any of ``others``."""
        return Poller(self.inbox.socket, *others, transport=self._transport)

    def bell(self) -> Bell:
        return self._transport.bell()

    def send(self, peer: str, message: Any) -> bool:
        return self._outboxes[peer].send(message)

    def close(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.stop()
        self._context.destroy()  # each socket keeps its own linger


class Inbox:
    """All messages to one worker, with gaps detected.

    ``missed`` is set when a sender's sequence number jumps or the sender restarts; the worker then reads the journal
    and clears it.
    """

    def __init__(self, context: zmq.Context[Socket], endpoint: str) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        _bind(self.socket, endpoint)
        self._expected: dict[type[Any], tuple[int, int]] = {}
        self.missed = True
        self.num_bad_frames = 0

    def recv_all(self) -> list[Any]:
        """Every message received so far, oldest first, without waiting."""
        messages: list[Any] = []
        while has_message(self.socket):
            try:
                frame = decode(self.socket.recv(_NO_WAIT))
            except BadFrame:
                self.num_bad_frames += 1
                self.missed = True
                continue
            self._note(frame)
            messages.append(frame.message)
        return messages

    def _note(self, frame: Frame) -> None:
        # Each message type has exactly one sender and one channel, so the type stands for the channel.
        kind = type(frame.message)
        if self._expected.get(kind, (frame.epoch, 0)) != (frame.epoch, frame.seq):
            self.missed = True
        self._expected[kind] = (frame.epoch, frame.seq + 1)


class Outbox:
    """The channel to one worker. Numbers each message type separately, as ``Inbox`` expects."""

    def __init__(self, context: zmq.Context[Socket], endpoint: str, epoch: int) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, SEND_LIMIT)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # without a peer a send fails instead of queueing
        self._socket.setsockopt(zmq.RECONNECT_IVL, 5)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        self._socket.connect(endpoint)
        self._epoch = epoch
        self._seqs: dict[type[Any], int] = {}

    def send(self, message: Any) -> bool:
        """False if it was dropped because the peer is down or behind; the next message then reveals the gap."""
        kind = type(message)
        seq = self._seqs.get(kind, 0)
        self._seqs[kind] = seq + 1
        try:
            self._socket.send(encode(message, epoch=self._epoch, seq=seq), _NO_WAIT)
        except zmq.Again:
            return False
        return True


class Router:
    """A socket for clients. Peers are named by their ZeroMQ identity, which does not authenticate them."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        endpoint: str,
        *,
        epoch: int,
        max_frame_bytes: int,
        public: CurveServer | None = None,
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 1000)  # only matters at a clean exit: lets the last answers leave
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, SEND_LIMIT)
        self.socket.setsockopt(zmq.RCVHWM, receive_limit(max_frame_bytes))
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + 1024)
        network = None if public is None else public.endpoint
        # A client that connects and stays silent costs a descriptor for this long. An honest one needs three round
        # trips, each of them 0.7 s by satellite, and more if packets are lost or ten thousand others connect at once;
        # if it is cut off, it begins anew.
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        watch_network(self.socket, lost_s=LOST_CLIENT_S)
        self.socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self.socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())  # the run directory's mode enforces the same
        self._has_keys = public is not None
        if public is not None:
            arm_server(self.socket, public)
        _bind(self.socket, endpoint)
        if network is not None:
            _bind(self.socket, network)
        self.endpoint = endpoint
        self._owners: OrderedDict[bytes, bytes] = OrderedDict()
        self._unsent = Unsent()
        # Not for local clients, which run as the same user.
        self._unfinished = None if network is None else Unfinished(int(network.rpartition(":")[2]))
        self._epoch = epoch
        self._seq = 0
        self.num_bad_frames = 0

    def recv(self) -> tuple[bytes, bytes] | None:
        """``(peer, frame)``, or None if nothing arrived. Messages of several frames are dropped and counted."""
        while has_message(self.socket):
            parts = self._recv_with_key() if self._has_keys else self.socket.recv_multipart(_NO_WAIT)
            if len(parts) == 2:
                return parts[0], parts[1]
            self.num_bad_frames += 1
        return None

    def _recv_with_key(self) -> list[bytes]:
        frames = self.socket.recv_multipart(_NO_WAIT, copy=False)
        peer = frames[0].bytes
        self._owners[peer] = str(frames[-1].get("User-Id")).encode()
        if self._unfinished is not None:
            self._unfinished.note_message(frames[-1].get(_SOURCE))
        self._owners.move_to_end(peer)
        if len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)
        return [frame.bytes for frame in frames]

    def limit_unfinished(self) -> None:
        """Close connections on which a message takes too much memory. Called a few times per second."""
        if self._unfinished is not None:
            self._unfinished.limit()

    def owner(self, peer: bytes) -> bytes:
        """The holder of the key used by this connection; the connection itself where no keys are used."""
        return self._owners.get(peer, peer)

    def send(self, peer: bytes, message: Any) -> bool:
        """False if the peer is gone or not reading; nothing was sent then."""
        try:
            return self.deliver(peer, message)
        except ConnectionError:
            return False

    def deliver(self, peer: bytes, message: Any) -> bool:
        """False if the peer is not reading at the moment; nothing was sent then.

        Raises:
            ConnectionError: it is gone; its identity is never used again.
        """
        if self._unsent.is_full(peer):
            return False
        frame = encode(message, epoch=self._epoch, seq=self._seq)
        try:
            if len(frame) < MIN_LARGE_BYTES:
                self.socket.send_multipart([peer, frame], _NO_WAIT)
            else:
                tracker: Any = self.socket.send_multipart([peer, frame], _NO_WAIT, copy=False, track=True)
                self._unsent.add(peer, tracker, len(frame))
        except zmq.Again:
            return False
        except zmq.ZMQError as error:  # EHOSTUNREACH
            raise ConnectionError(f"no client is connected as {peer.hex()}: {error.strerror}") from error
        self._seq += 1
        return True


class Bell:
    """Lets another thread end a wait. Several rings before the next wait count as one."""

    def __init__(self) -> None:
        self.file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.file, 1)

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.file)

    def close(self) -> None:
        os.close(self.file)


class Poller:
    """Waits for any of several sockets, or for a bell's file descriptor."""

    def __init__(self, *sockets: Socket | int, transport: Transport = ZMQ) -> None:
        self._poller = transport.poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        self._poller.poll(milliseconds(timeout_s))


def milliseconds(timeout_s: float) -> int:
    # Rounded up: rounded down, the last fraction of a millisecond would be spent polling without a wait.
    return max(0, math.ceil(timeout_s * 1000))
