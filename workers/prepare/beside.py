"""A thread for what may take long, which is given up where something in it takes too long."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .turns import Owner, Turns

T = TypeVar("T")
MAX_STUCK = 8  # threads; a worker with so many is no use any more

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    work: Callable[[], T]
    done: Callable[[T | None], None]
    result: T | None = None


class Beside(Generic[T]):
    """Does one job after another in a thread, of those who wait in turns; everything but the work itself is for the
    thread that owns this.

    A thread cannot be stopped from outside. One whose job takes longer than ``timeout_s`` is left to itself: it ends
    with that job, or with the process. The job counts as done without a result, and another thread does the rest.
    """

    def __init__(self, timeout_s: float, *, ring: Callable[[], None]) -> None:
        """``ring`` is called, by the thread beside, when there is something to ``collect``."""
        self._timeout_s = timeout_s
        self._ring = ring
        self._waiting: Turns[_Job[T]] = Turns()
        self._finished: deque[_Job[T]] = deque()
        self._running: _Job[T] | None = None
        self._give_up_at = 0.0
        self._inbox: queue.SimpleQueue[_Job[T] | None] | None = None  # of the thread in use
        self.num_stuck = 0  # threads that were given up and have not come back

    def submit(self, owner: Owner, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        """``done`` is called by ``collect`` with what ``work`` returned, or with None if it took too long."""
        self._waiting.add(owner, _Job(work, done))
        self._start_next()

    def collect(self) -> None:
        """Finish what is done, give up what takes too long.

        Raises:
            RuntimeError: so many threads are stuck that this process should begin anew.
        """
        while self._finished:
            job = self._finished.popleft()
            if job is self._running:
                self._running = None
                job.done(job.result)
            else:  # it was given up before, and its thread has ended since
                self.num_stuck -= 1
        if self._running is not None and time.monotonic() > self._give_up_at:
            self._give_up(self._running)
        self._start_next()

    def _give_up(self, job: _Job[Any]) -> None:
        self.num_stuck += 1
        logger.error("a job took longer than %.1f s, its thread is given up", self._timeout_s)
        assert self._inbox is not None, "somebody does the job"
        self._inbox.put(None)  # should it ever come back it ends
        self._running = self._inbox = None
        job.done(None)
        if self.num_stuck >= MAX_STUCK:
            raise RuntimeError(f"{self.num_stuck} threads are stuck")

    def _start_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        if self._inbox is None:
            self._inbox = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(self._inbox,), name="tokenizer", daemon=True).start()
        _, self._running = self._waiting.take()
        self._give_up_at = time.monotonic() + self._timeout_s
        self._inbox.put(self._running)

    def close(self) -> None:
        """The thread ends after what it is doing."""
        if self._inbox is not None:
            self._inbox.put(None)

    def _work(self, inbox: queue.SimpleQueue[_Job[T] | None]) -> None:
        while (job := inbox.get()) is not None:
            job.result = job.work()
            self._finished.append(job)
            self._ring()
