"""A function that runs in its own thread, but only while its caller waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Strand:
    """Never runs concurrently: the caller of ``resume`` waits until the function pauses or ends."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.error: BaseException | None = None  # the exception it raised
        self.has_ended = False
        self._function = function
        self._may_go, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def resume(self) -> None:
        self._may_go.release()
        self._has_paused.acquire()

    def pause(self) -> None:
        """Called by the function."""
        self._has_paused.release()
        self._may_go.acquire()

    def _run(self) -> None:
        self._may_go.acquire()
        try:
            self._function()
        except BaseException as error:  # the caller of resume inspects it
            self.error = error
        self.has_ended = True
        self._has_paused.release()
