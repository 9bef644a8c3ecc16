"""A network that loses every packet of some connections, and tells nobody: as if a machine had lost its power, or a
router had forgotten the connection.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
import struct
from contextlib import suppress

BPF_RETURN, SO_ATTACH_FILTER = 0x06, 26  # linux/bpf_common.h, asm-generic/socket.h
_UNACKED = struct.Struct("=24xI")  # where struct tcp_info has tcpi_unacked (linux/tcp.h)


def lose_packets(file: int) -> None:
    """None that arrives for this socket from now on reaches it: a filter of one instruction lets no byte through."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    with _opened(file) as end:
        end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def connections_of(port: int) -> list[int]:
    """Descriptors of what this process has accepted at a TCP port."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _opened(int(name)) as end:
            if end.getpeername() and end.getsockname()[1:2] == (port,):
                found.append(int(name))
    return found


def num_unconfirmed(file: int) -> int:
    """Packets that were sent on this connection, and whose arrival is not known yet."""
    with _opened(file) as end:
        return int(_UNACKED.unpack_from(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))[0])


def _opened(file: int) -> socket.socket:
    """A duplicate of a descriptor.

    Raises:
        OSError: it is no socket.
    """
    if not stat.S_ISSOCK(os.fstat(file).st_mode):  # it would stay open
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    return socket.socket(fileno=os.dup(file))
