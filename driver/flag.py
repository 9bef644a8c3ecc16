"""An event that signal handlers may use."""

from __future__ import annotations

import threading


class Flag:
    """As ``threading.Event``, which deadlocks in a handler of a signal that has interrupted a use of the same event:
    its lock is not reentrant.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # reentrant by default
        self._is_set = False

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is set, at once or at the latest after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_set, timeout_s)
