"""One role of the pipeline and its process: the supervisor's bookkeeping."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from dataclasses import dataclass, field

from ..protocol.cgroups import memory_ran_out
from ..protocol.errors import TriptychError, WorkerDied
from ..protocol.lifeline import ask_for_stacks
from ..protocol.proc_stat import is_stopped
from ..protocol.starvation import Starvation
from .deaths import CROWDED, last_words
from .processes import Process
from .upgrade import explain

logger = logging.getLogger(__name__)

SHORTAGE_S = 1.0  # until a worker is started again that lacked what others have: it would lack it at once again
CROWD_LASTS_S = 10.0  # since it last died of them; it is ready for moments in between
MAX_EXPLAINED = 8  # times max_restarts: limit for all deaths, including those explained by an identified request
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.01, 5.0
_MAX_SUMMARY = 300  # characters


@dataclass(slots=True)
class Worker:
    """Internal deaths are counted twice: all of them, and those that no identified request explains.

    Once it is known which request crashed a process, that request is refused from then on: such a death says nothing
    about the next process, and requires no back-off.
    """

    role: str
    process: Process | None = None
    pidfd: int = -1
    start_at: float = 0.0  # not before this time; back-off keeps a worker that dies at once from using up the machine
    started_at: float = field(default_factory=time.monotonic)  # or since when it is waited for, at first
    seen_running_at: float = 0.0  # when it was last seen not suspended
    seen_ready_of: float = 0.0  # ``started_at`` of the process that was last seen ready
    excused_until: float = 0.0  # see ``excuse``
    crowded_at: float = -math.inf  # when it last died of too many clients
    short_at: float = -math.inf  # when it last died of these, or of anything else that others have
    is_news: bool = True  # this death is to be in the log
    starvation: Starvation = field(default_factory=Starvation)
    deaths: deque[float] = field(default_factory=deque)  # internal, unexplained, within the restart window
    all_deaths: deque[float] = field(default_factory=deque)  # internal, explained or not, within the restart window
    num_restarts: int = 0
    last_death: str = ""  # see ``WorkerHealth``
    version: str = ""  # of this process, if the package was upgraded before it was started
    hung: bool = False  # this process was killed because it made no progress
    killed: bool = False  # by the supervisor, for this or another reason
    abandoned: bool = False  # died too often, and is not restarted

    @property
    def alive(self) -> bool:
        return self.process is not None

    @property
    def pid(self) -> int | None:
        """Of its process, which the supervisor's thread may drop at any time; None if there is none."""
        process = self.process
        return None if process is None else process.pid

    def note_phase(self, phase: str, now: float) -> None:
        """Tell the log when a restart is over, by which one that takes long can be explained. Called often."""
        if phase == "ready" and self.seen_ready_of != self.started_at:
            self.seen_ready_of = self.started_at
            if self.num_restarts:
                logger.info("%s is ready again %.1f s after its start", self.role, now - self.started_at)

    def kill(self) -> None:
        """In the supervisor's thread."""
        if self.process is not None:
            self.process.kill()
            self.killed = True

    def kill_hung(self) -> None:
        """Kill a worker that makes no progress, after it has shown in its log where it is. In the supervisor's thread.

        One that is suspended shows nothing, and is not at fault.
        """
        if self.process is not None and not is_stopped(self.process.pid):
            self.hung = True
            ask_for_stacks(self.process)
        self.kill()

    def drop_process(self) -> None:
        """End a process that could not be watched."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def stopped_s(self, now: float) -> float:
        """For how long it has been seen suspended, as by SIGSTOP or a debugger; 0 if it is not."""
        if (pid := self.pid) is None or not is_stopped(pid):
            self.seen_running_at = now
        return now - max(self.seen_running_at, self.started_at)

    def why_died(self, code: int, log: str, *, out_of_memory: bool = False) -> WorkerDied:
        """``log``: its last lines, if they are of interest. ``out_of_memory``: the kernel ended it for that."""
        hint = explain(self.version) if self.version and code > 0 else memory_ran_out() if out_of_memory else ""
        return WorkerDied(self.role, code, log, hint=hint)

    def excuse(self, until: float) -> None:
        """Do not count its silence until then: after the whole machine stood still, as a paused container does, or was
        too busy for the supervisor to look, the step in progress takes a while to end.
        """
        self.excused_until = max(self.excused_until, until)

    def note_shortage(self, what: str, now: float, *, window_s: float) -> None:
        """It died of ``what`` it lacked, and will again and again until others have less: the log says so once, unless
        it was well for ``window_s``.
        """
        self.is_news, self.short_at = now - self.short_at > window_s, now
        self.crowded_at = now if what == CROWDED else self.crowded_at
        self.start_at, self.last_death = now + SHORTAGE_S, what
        if self.is_news:
            logger.error("%s %s; it is started again every %g s", self.role, what, SHORTAGE_S)

    def is_crowded(self, now: float) -> bool:
        """Whether it dies of too many clients, or did until a moment ago."""
        return now - self.crowded_at < CROWD_LASTS_S

    def is_hung(self, now: float, silent_s: float, patience_s: float) -> bool:
        """Whether it has been silent for longer than its patience, through its own fault."""
        if not self.alive or now < self.excused_until:
            return False
        return silent_s - self.starved_s(silent_s, patience_s) > patience_s

    def starved_s(self, silent_s: float, patience_s: float) -> float:
        """How much of its silence it waited for a processor: killing it would cost a start, and blame its requests."""
        return 0.0 if (pid := self.pid) is None else self.starvation.of(pid, silent_s, patience_s)

    def note_death(self, now: float, error: TriptychError, *, num_explained: int) -> None:
        """One more internal death, of ``error``; it explains ``num_explained`` deaths, itself included."""
        self.last_death = _summary(error)
        self.all_deaths.append(now)
        self.deaths.append(now)
        for _ in range(min(num_explained, len(self.deaths))):
            self.deaths.pop()

    def forget_deaths(self, before: float) -> None:
        for deaths in (self.deaths, self.all_deaths):
            while deaths and deaths[0] < before:
                deaths.popleft()

    def is_hopeless(self, error: TriptychError, *, was_ready: bool, max_deaths: int) -> bool:
        """Whether it has died too often, the last time of ``error``, or of something that will repeat itself.

        So does a failure before the pipeline ``was_ready``: the model or a setting is wrong. And one of another
        version, which cannot read what the others write.
        """
        has_failed = isinstance(error, WorkerDied) and (error.exit_code or 0) > 0
        is_repeated = has_failed and (not was_ready or self.version != "")
        return is_repeated or len(self.deaths) > max_deaths or len(self.all_deaths) > MAX_EXPLAINED * max_deaths

    @property
    def back_off_s(self) -> float:
        """How long to wait before it is restarted."""
        if not self.deaths:
            return 0.0
        num_doublings = min(len(self.deaths) - 1, 64)  # 2.0**1024 would overflow
        return min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0**num_doublings)

    def health(self, *, phase: str, ok: bool, since_progress_s: float, epoch: int) -> WorkerHealth:
        return WorkerHealth(
            phase=phase,
            ok=ok,
            since_progress_s=since_progress_s,
            pid=self.pid,
            epoch=epoch,
            restarts=self.num_restarts,
            recent_deaths=len(self.deaths),
            last_death=self.last_death,
        )


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """The health of one worker."""

    phase: str  # "ready", or the phase of its start
    ok: bool  # ready, and made progress within its patience
    since_progress_s: float  # during a start: since it was started
    pid: int | None  # None: not running
    epoch: int  # counts the starts of this role, from 1
    restarts: int
    recent_deaths: int  # internal and unexplained, within the restart window
    last_death: str = ""  # the exit code of the latest internal one, and the last line of its log; or why it was none


def _summary(error: TriptychError) -> str:
    """In one line."""
    if not isinstance(error, WorkerDied):
        return error.message
    code = f"exit code {error.exit_code}" + (f", {error.hint}" if error.hint else "")
    return ": ".join(filter(None, [code, last_words(error.stderr)]))[:_MAX_SUMMARY]
