"""CURVE, ZeroMQ's encryption, and the question who may come in. Besides ``channels`` the only place with ZeroMQ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq

Socket = zmq.Socket[bytes]
DOMAIN = b"triptych"


@dataclass(frozen=True, slots=True)
class PublicDoor:
    """A server's side of it."""

    endpoint: str | None  # tcp://; None: only holders of keys come in, and nobody from elsewhere
    server_secret: str = field(repr=False)  # Z85
    allows: Callable[[str], bool]  # asked with a client's public key, Z85, in a thread of its own


class CurveKeys(Protocol):
    """A client's side of it, Z85 each; ``keys.ClientKeys`` is one."""

    @property
    def server(self) -> str: ...

    @property
    def public(self) -> str: ...

    @property
    def secret(self) -> str: ...


def new_key_pair() -> tuple[str, str]:
    """A public and a secret key, Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def arm_server(socket: Socket, door: PublicDoor) -> None:
    """Let in only who proves that he has a key, and only if the gatekeeper says so: to be called before a bind."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, door.server_secret.encode())
    # NOTE: with a domain ZeroMQ refuses everybody while there is no gatekeeper; without one it would let everybody in.
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)


def arm_client(socket: Socket, keys: CurveKeys) -> None:
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


def start_gatekeeper(context: zmq.Context[Socket], door: PublicDoor) -> Any:
    """Answers ZeroMQ's question about every handshake (ZAP, ZeroMQ RFC 27) until its ``stop`` is called."""
    from zmq.auth.thread import ThreadAuthenticator  # here: it brings asyncio, which nobody else needs

    gatekeeper = ThreadAuthenticator(context)
    gatekeeper.start()
    gatekeeper.configure_curve_callback(domain=DOMAIN.decode(), credentials_provider=_AllowList(door.allows))
    return gatekeeper


class _AllowList:
    """What pyzmq's authenticator asks about a client's key."""

    def __init__(self, allows: Callable[[str], bool]) -> None:
        self._allows = allows

    def callback(self, domain: str, key: bytes) -> bool:
        return self._allows(key.decode())  # Z85 already
