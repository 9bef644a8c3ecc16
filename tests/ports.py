"""Ports for servers that do not accept port 0."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"
