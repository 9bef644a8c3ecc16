"""An event that is safe to use in signal handlers."""

from __future__ import annotations

import threading


class Flag:
    """Like ``threading.Event``, which deadlocks in a signal handler that interrupts a use of the same event: its lock
    is not reentrant.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # reentrant by default
        self._is_set = False

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout_s``; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_set, timeout_s)
