"""The share of the machine used by other processes during a measurement, and equal priority for all engines."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil


class Meter:
    """``foreign`` is the share of all processors that processes outside our own tree used, 0 to 1."""

    foreign = 0.0

    def __enter__(self) -> Meter:
        self._start, self._busy, self._own = time.perf_counter(), _busy_s(), _tree_s(os.getpid())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        seconds = time.perf_counter() - self._start
        others = (_busy_s() - self._busy) - (_tree_s(os.getpid()) - self._own)
        self.foreign = max(0.0, others / seconds / (os.cpu_count() or 1))


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _tree_s(pid: int) -> float:
    """Processor time in seconds of a process and its descendants, including terminated ones."""
    total = 0.0
    for process in _tree(pid):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def share_priority(pid: int) -> None:
    """Give our own autogroup's priority to a process and its descendants, if Linux has autogroups and permits it.

    A process that starts a session, as our workers do, leaves its parent's autogroup, and with it the priority.
    """
    with suppress(OSError, psutil.Error):
        nice = Path("/proc/self/autogroup").read_text().split()[-1]
        for process in _tree(pid):
            Path(f"/proc/{process.pid}/autogroup").write_text(nice)


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]
