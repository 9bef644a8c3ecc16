"""A client's two sockets; see ``channels`` for the rest of ZeroMQ."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq

from .channels import SEND_LIMIT, ZMQ, Transport, has_message, milliseconds, watch_network
from .codec import Frame, decode, encode
from .curve import Admission, CurveKeys, Socket
from .errors import BadFrame, ConfigError

LAST_WORDS_MS = 500  # time for a closing client's last messages to leave
# Until a service on the network that confirms nothing is connected again, or a connection that does not come about is
# begun anew: together less than a lease.
LOST_S, CONNECT_S = 5.0, 3.0
LOOK_AGAIN_S = 1.0  # how long a message waits until the client checks whether its service has moved
# As plain ints: zmq's flags are Enum members, whose operators cost more than the calls they are passed to.
_READ, _READ_AND_WRITE = int(zmq.POLLIN), int(zmq.POLLIN | zmq.POLLOUT)
_NO_WAIT = int(zmq.NOBLOCK)


class Address(NamedTuple):
    """Where a service accepts clients, and the keys with which it does."""

    submit: str
    follow: str
    keys: CurveKeys | None = None


class Connection:
    """A client's two sockets. One thread uses it, except for ``wake``, which any thread may call.

    A message is held here, not in ZeroMQ, until its server is connected: a server that is away for an hour costs one
    copy of each queued message, however often it is queued again.
    """

    def __init__(
        self,
        address: Address,
        *,
        look_up: Callable[[], Address] | None = None,
        transport: Transport = ZMQ,
    ) -> None:
        """``look_up`` finds the address again while the server does not answer: a client may be there before its
        driver, whose endpoints and keys are not known until then.

        Raises:
            ConfigError: an endpoint is malformed, or no descriptor or thread is left.
        """
        self._context = transport.context()
        self._queues: dict[str, dict[Any, Any]] = {"submit": {}, "follow": {}}
        self._bell = transport.bell()
        self._poller = transport.poller()
        self._poller.register(self._bell.file, zmq.POLLIN)
        self._look_up = look_up
        try:
            self._connect(address)
        except BaseException:
            self._context.destroy(linger=0)
            self._bell.close()
            raise

    def _connect(self, address: Address) -> None:
        self._address = address
        self._look_up_at = time.monotonic() + LOOK_AGAIN_S
        self._admissions: list[Admission] = []
        self._has_sent: set[str] = set()
        endpoints = {"submit": address.submit, "follow": address.follow}
        self._sockets = {name: self._dealer(endpoint, address.keys) for name, endpoint in endpoints.items()}
        for socket in self._sockets.values():
            self._poller.register(socket, _READ)

    def _dealer(self, endpoint: str, keys: CurveKeys | None) -> Socket:
        try:
            return self._connected(endpoint, keys)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot connect to {endpoint!r:.200}: {zmq.strerror(error.errno or 0)}") from error

    def _connected(self, endpoint: str, keys: CurveKeys | None) -> Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 5)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        socket.setsockopt(zmq.SNDHWM, SEND_LIMIT)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, milliseconds(CONNECT_S))
        watch_network(socket, lost_s=LOST_S)
        if keys is None:
            socket.connect(endpoint)
        else:
            self._admissions.append(Admission(socket, endpoint, keys))
        return socket

    def _move(self, look_up: Callable[[], Address]) -> None:
        """Connect elsewhere if messages could not be sent for a while and the service is not where it was."""
        now = time.monotonic()
        is_due = now >= self._look_up_at
        if is_due or not any(self._queues.values()):
            self._look_up_at = now + LOOK_AGAIN_S
        if is_due and any(self._queues.values()):
            address = self._address
            with contextlib.suppress(ConfigError):  # keys that are just being written, or are another user's
                address = look_up()
            if address != self._address:
                self._disconnect()
                self._connect(address)

    def _disconnect(self) -> None:
        for admission in self._admissions:
            admission.close()
        for socket in self._sockets.values():
            self._poller.unregister(socket)
            socket.close(0)

    def queue(self, name: str, key: Any, message: Any) -> None:
        """Send once the server is connected; a later message with the same key replaces one still waiting."""
        self._queues[name][key] = message

    def wake(self) -> None:
        self._bell.ring()

    def wait(self, timeout_s: float) -> list[Frame]:
        """Wait for a message, for room to send or for ``wake``; send what is queued and return what arrived.

        Frames that are not messages of this protocol version are dropped.
        """
        for admission in self._admissions:
            admission.retry()
        self._flush()
        if self._look_up is not None:
            self._move(self._look_up)
        for name, socket in self._sockets.items():
            self._poller.register(socket, _READ_AND_WRITE if self._queues[name] else _READ)
        ready = dict(self._poller.poll(milliseconds(timeout_s)))
        if self._bell.file in ready:
            self._bell.silence()
        self._flush()
        return [frame for socket in self._sockets.values() if socket in ready for frame in _drain(socket)]

    def _flush(self) -> None:
        for name, queue in self._queues.items():
            while queue:
                key = next(iter(queue))
                try:
                    self._sockets[name].send(encode(queue[key]), _NO_WAIT)
                except zmq.Again:
                    break
                self._has_sent.add(name)
                del queue[key]

    @property
    def has_connected(self) -> bool:
        """Whether both sockets have been connected."""
        # Without a connection there is no room to send; with one, there is until something was sent.
        sockets = [socket for name, socket in self._sockets.items() if name not in self._has_sent]
        return all(int(socket.get(zmq.EVENTS)) & zmq.POLLOUT for socket in sockets)

    def drop_requests(self) -> set[Any]:
        """Drop every request not yet sent; returns their keys."""
        dropped = set(self._queues["submit"])
        self._queues["submit"].clear()
        return dropped

    def close(self) -> None:
        """Queued messages about answers still leave if the server reads: without its ABORT a request runs on for a
        lease, without its ACKNOWLEDGE an answer is kept for one. No more requests are sent.
        """
        self.drop_requests()
        try:
            self._flush()
        finally:
            self._context.destroy(linger=LAST_WORDS_MS)
            self._bell.close()


def _drain(socket: Socket) -> list[Frame]:
    frames: list[Frame] = []
    while has_message(socket):
        with contextlib.suppress(BadFrame):
            frames.append(decode(socket.recv(_NO_WAIT)))
    return frames
