"""Where the gateway listens: a bound socket from an address, and the URL that clients use."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....protocol.errors import ConfigError
from ....protocol.keep_alive import ASK_AGAIN_S, NUM_QUESTIONS, SILENCE_S

DEFAULT_HOST = "127.0.0.1"
MAX_PORT = 65535
BACKLOG = 2048  # connections that wait while a gateway process is restarted
URL_FILE = "http_url"  # in the run directory: the gateway's URL
_UNIX = "unix:"


def listen(address: str) -> socket.socket:
    """A socket that listens at ``HOST:PORT``, ``:PORT``, ``PORT``, ``[IPv6]:PORT`` or ``unix:PATH``.

    Raises:
        ConfigError: the address is malformed or not available.
    """
    try:
        return _listen_unix(address[len(_UNIX) :]) if _is_path(address) else _listen_tcp(*split_address(address))
    except (OSError, UnicodeError) as error:  # the latter: no name of a host
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen at {address}: {reason}", param="http") from error


@contextlib.contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    """``listen`` inside this block; at its end, the file of a Unix socket is removed."""
    with listen(address) as listener:
        file = listener.getsockname() if listener.family == socket.AF_UNIX else None
        try:
            yield listener
        finally:
            if file is not None:
                with contextlib.suppress(OSError):
                    os.unlink(file)


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ConfigError: the address is malformed.
    """
    host, _, port = address.rpartition(":")
    if not port.isascii() or not port.isdigit() or "/" in host:
        raise ConfigError(f"http is {address!r:.80}, the form is HOST:PORT, :PORT or unix:PATH", param="http")
    if len(port.lstrip("0")) > len(str(MAX_PORT)) or int(port) > MAX_PORT:
        raise ConfigError(f"http is {address!r:.80}: port {port:.20}, the limits are 0 and {MAX_PORT}", param="http")
    if host == "*":  # to glibc, the loopback address
        text = f"http is {address!r}, but * is no address; docs/http.md names the one that stands for all"
        raise ConfigError(text, param="http")
    return host.strip("[]") or DEFAULT_HOST, int(port)


def _is_path(address: str) -> bool:
    """Without a path, Linux would choose an address that no client knows."""
    return address.startswith(_UNIX) and address != _UNIX


def url_of(listener: socket.socket, *, is_tls: bool = False) -> str:
    """The URL for clients on this machine."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _listen_tcp(host: str, port: int) -> socket.socket:
    """At the first of the host's addresses that this machine has: localhost may be 127.0.0.1, ::1 or both."""
    first: OSError | None = None
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return _listen_at(socket.socket(family, kind, protocol), where)
        except OSError as error:
            first = first or error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    raise first or OSError(errno.EADDRNOTAVAIL, "the host has no address")


def _listen_at(listener: socket.socket, where: Any) -> socket.socket:
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _ask_silent_clients(listener)
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _ask_silent_clients(listener: socket.socket) -> None:
    """Let the kernel end the connections of machines that have vanished, so that their answers are computed no further.

    The questions also keep routers from forgetting a connection that waits for a long answer, as many do after some
    minutes of silence. Accepted connections inherit this.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_AGAIN_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_QUESTIONS)


def _listen_unix(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(Path(path).stat().st_mode) and not is_served(path):
            Path(path).unlink()  # left by a server that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def is_served(path: str) -> bool:
    """Whether a process listens at this Unix socket; its file alone is there a moment earlier, and after a kill."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0
