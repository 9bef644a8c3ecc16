"""A worker thread for jobs that may take long, abandoned and replaced when one takes too long."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..process import STOPPED_S
from .turns import Owner, Turns

T = TypeVar("T")
MAX_STUCK = 8  # threads; a process with that many should be restarted

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    work: Callable[[], T]
    done: Callable[[T | None], None]
    result: T | None = None


class JobThread(Generic[T]):
    """Runs one job at a time in a thread, serving owners in turn. Only the jobs themselves run in that thread; all
    methods and callbacks run in the thread that uses this object.

    A thread cannot be stopped from outside. One whose job takes longer than ``timeout_s`` is abandoned: it ends with
    that job, or with the process. The job counts as done without a result, and a new thread takes over the rest.
    """

    def __init__(self, timeout_s: float, *, ring: Callable[[], None]) -> None:
        """``ring`` is called from the job thread when there is something to ``collect``."""
        self._timeout_s = timeout_s
        self._ring = ring
        self._waiting: Turns[_Job[T]] = Turns()
        self._finished: deque[_Job[T]] = deque()
        self._running: _Job[T] | None = None
        self._running_s = 0.0  # for how long
        self._looked_at = 0.0
        self._inbox: queue.SimpleQueue[_Job[T] | None] | None = None  # of the current thread
        self.num_stuck = 0  # abandoned threads that have not finished

    def submit(self, owner: Owner, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        """``collect`` calls ``done`` with the result of ``work``, or with None if it took too long."""
        self._waiting.add(owner, _Job(work, done))
        self._start_next()

    def collect(self) -> None:
        """Complete finished jobs, and give up the running one if it takes too long.

        Raises:
            RuntimeError: so many threads are stuck that this process should be restarted.
        """
        while self._finished:
            job = self._finished.popleft()
            if job is self._running:
                self._running = None
                job.done(job.result)
            else:  # it had been given up, and its thread has finished since
                self.num_stuck -= 1
        self._look()
        if self._running is not None and self._running_s > self._timeout_s:
            self._give_up(self._running)
        self._start_next()

    def _look(self) -> None:
        """While this process is stopped, as in a paused container, so are its threads: that time does not count."""
        now = time.monotonic()
        self._running_s += min(now - self._looked_at, STOPPED_S)
        self._looked_at = now

    def _give_up(self, job: _Job[Any]) -> None:
        self.num_stuck += 1
        logger.error("a job took longer than %.1f s: abandoning its thread", self._timeout_s)
        assert self._inbox is not None, "a running job has a thread"
        self._inbox.put(None)  # ends the thread if it ever finishes the job
        self._running = self._inbox = None
        job.done(None)
        if self.num_stuck >= MAX_STUCK:
            raise RuntimeError(f"{self.num_stuck} threads are stuck")

    def _start_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        if self._inbox is None:
            inbox: queue.SimpleQueue[_Job[T] | None] = queue.SimpleQueue()
            try:
                threading.Thread(target=self._work, args=(inbox,), name="tokenizer", daemon=True).start()
            except RuntimeError as error:  # too many on this machine: the next ``collect`` tries it again
                logger.warning("jobs wait for a thread: %s", error)
                return
            self._inbox = inbox
        _, self._running = self._waiting.take()
        self._running_s, self._looked_at = 0.0, time.monotonic()
        self._inbox.put(self._running)

    def close(self) -> None:
        """The thread ends after its current job."""
        if self._inbox is not None:
            self._inbox.put(None)

    def _work(self, inbox: queue.SimpleQueue[_Job[T] | None]) -> None:
        while (job := inbox.get()) is not None:
            job.result = job.work()
            self._finished.append(job)
            self._ring()
