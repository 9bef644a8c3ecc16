"""What systemd is told of ``serve`` if its unit has ``Type=notify``, see sd_notify(3)."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_BUSY_S = 1.0  # for systemd to make room in its queue


def notify(*fields: str) -> None:
    """Send fields such as ``READY=1`` to the service manager; without one, do nothing."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.settimeout(_BUSY_S)
        out.sendto("\n".join(fields).encode(), address)
