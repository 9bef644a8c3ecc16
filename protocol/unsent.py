"""How many bytes ZeroMQ holds for each client that does not read; ZeroMQ itself only counts messages."""

from __future__ import annotations

from collections import deque
from typing import Protocol

MIN_LARGE_BYTES = 1 << 16  # below this, a thousand messages (ZeroMQ's own limit) are at most 64 MiB
MAX_UNSENT_BYTES = 16 << 20  # of larger messages to one client; a client that reads drains them in 10 ms


class Tracker(Protocol):
    """``zmq.MessageTracker``."""

    @property
    def done(self) -> bool:
        """Whether ZeroMQ has passed the message to the kernel, or dropped it with its connection."""


class Unsent:
    """The large messages in flight of each connection, oldest first."""

    def __init__(self) -> None:
        self._messages: dict[bytes, deque[tuple[Tracker, int]]] = {}
        self._tidy_at = 64

    def __len__(self) -> int:
        return len(self._messages)

    def is_full(self, peer: bytes) -> bool:
        """Whether this client must read before more is sent to it."""
        messages = self._messages.get(peer)
        if messages is None:
            return False
        while messages and messages[0][0].done:
            messages.popleft()
        if not messages:
            del self._messages[peer]
        return sum(num_bytes for _, num_bytes in messages) >= MAX_UNSENT_BYTES

    def add(self, peer: bytes, tracker: Tracker, num_bytes: int) -> None:
        self._messages.setdefault(peer, deque()).append((tracker, num_bytes))
        if len(self._messages) > self._tidy_at:  # many belong to clients that have left
            self._messages = {peer: each for peer, each in self._messages.items() if not each[-1][0].done}
            self._tidy_at = 2 * len(self._messages) + 64
