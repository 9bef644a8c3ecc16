"""One role of the pipeline and the process that fills it, as the supervisor keeps count of it."""

from __future__ import annotations

import subprocess
from collections import deque
from dataclasses import dataclass, field

from .deaths import is_stopped

FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.01, 5.0


@dataclass(slots=True)
class Worker:
    """Its deaths by its own fault are counted twice: all of them, and those for which nobody was named.

    Once it is known which request ended a process, that request is refused from then on: such deaths say nothing of the
    next process, and need not be waited for.
    """

    role: str
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    start_at: float = 0.0  # not before this time; waiting lets a worker that dies at once not eat the machine
    started_at: float = 0.0
    seen_running_at: float = 0.0  # when it was last looked at and nobody had stopped it
    deaths: deque[float] = field(default_factory=deque)  # within the restart window, by its own fault, unexplained
    all_deaths: deque[float] = field(default_factory=deque)  # the same, explained or not
    num_restarts: int = 0
    hung: bool = False  # this process was killed because it made no progress
    abandoned: bool = False  # died too often, and is not started again

    @property
    def alive(self) -> bool:
        return self.process is not None

    def stopped_s(self, now: float) -> float:
        """For how long it has been found stopped, as by SIGSTOP or a debugger; 0 while it is not."""
        if self.process is None or not is_stopped(self.process.pid):
            self.seen_running_at = now
        return now - max(self.seen_running_at, self.started_at)

    def note_death(self, now: float, *, num_explained: int) -> None:
        """One more, by its own fault; with it so many are explained."""
        self.all_deaths.append(now)
        self.deaths.append(now)
        for _ in range(min(num_explained, len(self.deaths))):
            self.deaths.pop()

    def forget_deaths(self, before: float) -> None:
        for deaths in (self.deaths, self.all_deaths):
            while deaths and deaths[0] < before:
                deaths.popleft()

    @property
    def back_off_s(self) -> float:
        """How long to wait before it is started again."""
        if not self.deaths:
            return 0.0
        num_doublings = min(len(self.deaths) - 1, 64)  # a float holds no more than 1024
        return min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0**num_doublings)


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """The current state of one worker."""

    phase: str  # "ready", or the phase of its start
    ok: bool  # ready, and it showed progress within its patience
    since_progress_s: float  # during its start: since it was started
    pid: int | None  # None: not running
    epoch: int  # number of this life, from 1
    restarts: int
    recent_deaths: int  # by its own fault, within the restart window, for which no request was named
