"""CURVE, ZeroMQ's encryption, and access control by key. Imports zmq, like ``channels`` and ``connection``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq

logger = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]
DOMAIN = b"triptych"
REFUSED_S = 1.0  # until a client whose key was refused tries again


@dataclass(frozen=True, slots=True)
class CurveServer:
    """The server's side of CURVE."""

    endpoint: str | None  # tcp://; None: local sockets only, still restricted to holders of keys
    server_secret: str = field(repr=False)  # Z85
    allows: Callable[[str], bool]  # called with a client's public key, Z85, in a separate thread


class CurveKeys(Protocol):
    """The client's side of CURVE, Z85 each; ``keys.ClientKeys`` implements it."""

    @property
    def server(self) -> str: ...

    @property
    def public(self) -> str: ...

    @property
    def secret(self) -> str: ...


def new_key_pair() -> tuple[str, str]:
    """A public and a secret key, both Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def arm_server(socket: Socket, server: CurveServer) -> None:
    """Require a proven key that the gatekeeper accepts. Call it before bind."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, server.server_secret.encode())
    # NOTE: with a domain set ZeroMQ refuses everyone while there is no gatekeeper; without one it accepts everyone.
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)


def arm_client(socket: Socket, keys: CurveKeys) -> None:
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


class Admission:
    """Connects a client's socket with its keys, and again if they are refused.

    ZeroMQ reconnects after everything but a refusal. Yet a key may be added later, or its file be unreadable for a
    moment.
    """

    def __init__(self, socket: Socket, endpoint: str, keys: CurveKeys) -> None:
        arm_client(socket, keys)
        self._socket, self._endpoint = socket, endpoint
        self._refusals = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._connect_at = math.inf
        socket.connect(endpoint)

    def retry(self) -> None:
        """Connect again, if it was refused a while ago. Called often while the client has something to say."""
        while self._refusals.poll(0):
            self._refusals.recv_multipart()
            self._connect_at = time.monotonic() + REFUSED_S
        if time.monotonic() >= self._connect_at:
            self._connect_at = math.inf
            self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    def close(self) -> None:
        """To be called before the socket is closed."""
        self._socket.disable_monitor()
        self._refusals.close(0)


def start_gatekeeper(context: zmq.Context[Socket], server: CurveServer) -> Any:
    """Answers ZeroMQ's authentication request for each handshake (ZAP, ZeroMQ RFC 27) until ``stop`` is called."""
    from zmq.auth.thread import ThreadAuthenticator  # imported here: it pulls in asyncio, which nothing else needs

    gatekeeper = ThreadAuthenticator(context)
    gatekeeper.start()
    gatekeeper.configure_curve_callback(domain=DOMAIN.decode(), credentials_provider=_AllowList(server.allows))
    return gatekeeper


class _AllowList:
    """The credentials provider that pyzmq's authenticator consults."""

    def __init__(self, allows: Callable[[str], bool]) -> None:
        self._allows = allows

    def callback(self, domain: str, key: bytes) -> bool:
        try:
            return self._allows(key.decode())  # Z85 already
        except Exception as error:  # it would end the gatekeeper's thread, after which nobody is admitted
            logger.error("a client is refused, as its key could not be looked up: %r", error)
            return False
