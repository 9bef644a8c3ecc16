"""How much of a message each client on the network has sent without ending it: ZeroMQ limits each frame of a message,
but not their number, and holds them all until the last one.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import struct
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

logger = logging.getLogger(__name__)

MAX_UNFINISHED_BYTES = 256 << 20  # of all connections together, on the wire; frames of few bytes take twice the memory
LOOK_BYTES = 64 << 20  # growth of this process's memory after which connections are looked at
_RECEIVED_BYTES = struct.Struct("=128xQ")  # where struct tcp_info has tcpi_bytes_received (linux/tcp.h)


class _Connection(NamedTuple):
    num_bytes: int  # beyond its last complete message
    file: int
    peer: tuple[str, int]

    @property
    def host(self) -> str:
        return self.peer[0]


class Unfinished:
    """Closes the connections that have sent most without ending a message, once all of them exceed the limit.

    It begins with those of the host that has sent most: otherwise one host with many connections, each of them small,
    would be spared for another's single large message. That loses nothing of honest clients: they connect again and
    repeat what was not answered.
    """

    def __init__(self, port: int, *, max_bytes: int = MAX_UNFINISHED_BYTES, look_bytes: int = LOOK_BYTES) -> None:
        """``port``: where this process accepts the connections."""
        self._port, self._max_bytes, self._look_bytes = port, max_bytes, look_bytes
        self._lowest = _resident_bytes()  # since the last look
        self._ended: set[int] = set()  # descriptors of the connections that have ended a message since then
        self._ended_at: dict[tuple[int, tuple[str, int]], int] = {}  # (descriptor, peer) -> bytes it had sent by then

    def note_message(self, file: int) -> None:
        """A message has arrived on the connection with this descriptor."""
        self._ended.add(file)

    def limit(self) -> None:
        """Look at all connections if this process has grown. Called a few times per second."""
        with suppress(OSError):  # no descriptor is left for a look
            self._limit()

    def _limit(self) -> None:
        size = _resident_bytes()
        self._lowest = min(self._lowest, size)
        if size - self._lowest < self._look_bytes:
            return
        connections = self._look()
        of_hosts: Counter[str] = Counter()
        for connection in connections:
            of_hosts[connection.host] += connection.num_bytes
        while of_hosts.total() > self._max_bytes:
            most = max(connections, key=lambda connection: (of_hosts[connection.host], connection.num_bytes))
            _close(most)
            connections.remove(most)
            of_hosts[most.host] -= most.num_bytes
        self._lowest = size

    def _look(self) -> list[_Connection]:
        ended_at, connections = {}, []
        for file, peer, num_received in _received(self._port):
            key = file, peer
            ended_at[key] = num_received if file in self._ended else self._ended_at.get(key, 0)
            connections.append(_Connection(num_received - ended_at[key], *key))
        self._ended, self._ended_at = set(), ended_at
        return connections


def _received(port: int) -> list[tuple[int, tuple[str, int], int]]:
    """``(descriptor, peer, bytes received)`` of all connections that this process has accepted at a TCP port."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        # Not a connection, closed meanwhile, or a kernel that does not count bytes.
        with suppress(OSError, struct.error), _duplicate(int(name)) as connection:
            peer, facts = connection.getpeername(), connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if connection.getsockname()[1] == port:
                found.append((int(name), (peer[0], peer[1]), _RECEIVED_BYTES.unpack_from(facts)[0]))
    return found


def _duplicate(file: int) -> socket.socket:
    """
    Raises:
        OSError: it is not a socket, or no descriptor is left.
    """
    if not stat.S_ISSOCK(os.fstat(file).st_mode):  # ``fromfd`` would leave its duplicate open
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    return socket.fromfd(file, socket.AF_INET, socket.SOCK_STREAM)  # also for IPv6: its own family counts


def _close(connection: _Connection) -> None:
    """ZeroMQ sees its end, and drops what it holds of the message."""
    host, port = connection.peer
    with suppress(OSError), _duplicate(connection.file) as duplicate:
        if duplicate.getpeername()[:2] == connection.peer:  # otherwise it has ended, and another one has its number
            duplicate.shutdown(socket.SHUT_RDWR)
            logger.warning(
                "the connection of %s, port %d, is closed: it sent %d bytes without the end of a message",
                host, port, connection.num_bytes,
            )  # fmt: skip


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
