"""Progress of the three workers' start, and a summary afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from ..signals import interrupts_noted
from .report import say as write

if TYPE_CHECKING:
    from rich.console import Console

    from ...driver.driver import Driver

Phases = dict[str, tuple[str, int, int]]  # by role: phase, done, total
Say = Callable[[str], None]
Show = Callable[[Phases, list[str]], None]


_SILENCE_S = 6.0  # of a load that shows no progress, as while the compiler runs
_COMPILING = "still loading: the first start on a machine compiles the kernels, in about half a minute on two cores"


def _say_nothing(_: str) -> None: ...


class Startup:
    """The times of each worker's phases as observed here, accurate to a tenth of a second."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._since: dict[str, list[tuple[str, float]]] = {}  # by role: phases, and when each was first seen
        self._is_explained = False

    def observe(self, phases: Phases) -> list[str]:
        """A line for every phase except the last that began since the previous call."""
        now = self._clock() - self._started
        news = []
        for role, (phase, _, total) in phases.items():
            seen = self._since.setdefault(role, [])
            if phase != "down" and (not seen or seen[-1][0] != phase):
                seen.append((phase, now))
                what = f" ({total} steps)" if total else ""
                if phase != "ready":
                    news.append(f"{role:<10} {phase}{what} after {now:.1f} s")
        return news

    def explanation(self, phases: Phases) -> str | None:
        """What a user may wonder about, once."""
        phase, _, total = phases.get("execute", ("down", 0, 0))
        if self._is_explained or phase != "loading" or total:
            return None
        self._is_explained = self._clock() - self._started - self._since["execute"][-1][1] > _SILENCE_S
        return _COMPILING if self._is_explained else None

    def account(self, pids: dict[str, int | None]) -> list[str]:
        """One line per process: its id, and the time spent in each phase."""
        return [f"{role:<10} pid {pids[role]} · {self._account_of(role)}" for role in self._since]

    def last(self) -> str:
        """The line of the process that was ready last, which determined the duration of the start."""
        role = max(self._since, key=lambda role: self._since[role][-1][1])
        return f"{role} {self._account_of(role)}"

    def _account_of(self, role: str) -> str:
        seen = self._since[role]
        ends = [since for _, since in seen[1:]]
        parts = [f"{phase} {end - since:.1f} s" for (phase, since), end in zip(seen, ends, strict=False)]
        detail = f" ({', '.join(parts)})" if parts else ""
        return f"{seen[-1][0]} after {seen[-1][1]:.1f} s{detail}"


def start(driver: Driver, console: Console, *, say: Say = _say_nothing) -> Startup:
    """Start the driver, with one bar per worker on a terminal, otherwise with one line per phase through ``say``.

    Raises:
        TriptychError: see ``Driver.start``.
        KeyboardInterrupt: Ctrl-C, once the driver has stopped; this takes seconds if workers are importing.
    """
    startup = Startup()
    with interrupts_noted() as interrupts, ExitStack() as stack:
        show = stack.enter_context(_bars(console) if console.is_terminal else nullcontext(_lines(say)))

        def look(driver: Driver) -> None:
            if interrupts:
                stack.close()
                write(console, "stopping…")
                raise KeyboardInterrupt
            phases = driver.phases
            show(phases, startup.observe(phases))
            if (text := startup.explanation(phases)) is not None:
                write(console, text) if console.is_terminal else say(text)

        driver.start(progress=look)
        look(driver)
    return startup


def _lines(say: Say) -> Show:
    def show(_: Phases, news: list[str]) -> None:
        for line in news:
            say(line)

    return show


@contextmanager
def _bars(console: Console) -> Iterator[Show]:
    """One bar per worker, removed when all are ready."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description:<10} {task.fields[phase]:<9}"), BarColumn(20))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(phases: Phases, _: list[str]) -> None:
            for role, (phase, done, total) in phases.items():
                shown = "starting" if phase == "down" else phase
                if role not in tasks:
                    tasks[role] = progress.add_task(role, phase=shown, total=None)
                # None leaves the total unchanged. A total of 0 would count as reached, and stop the clock.
                done, total = (1, 1) if phase == "ready" else (done, total)
                progress.update(tasks[role], phase=shown, completed=done, total=total or None)

        yield show
