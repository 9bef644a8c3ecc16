"""How long others waited for a processor, or for memory: on a machine with more to do than it can, slow is not stuck.

Whoever gives up on a process or a thread after some time subtracts what it waited: a new start would cost it even more
there, and what it works on is not to blame.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from .proc_stat import MAJOR_FAULTS, stat_field


def run_delays(pid: int) -> dict[int, int]:
    """How long each thread of a process, by its id, has been ready to run and waited for a processor, in ns.

    Empty if the kernel does not count it, and once the process has ended. Source:
    Documentation/scheduler/sched-stats.rst.
    """
    tasks, delays = Path(f"/proc/{pid}/task"), {}
    with suppress(OSError):  # the process has ended, maybe during the loop
        for thread in os.listdir(tasks):
            with suppress(OSError, IndexError):  # the thread has ended; the kernel has no such statistics
                delays[int(thread)] = int((tasks / thread / "schedstat").read_text().split()[1])
    return delays


def longest_s(delays: dict[int, int], before: dict[int, int]) -> float:
    """How long the thread that waited longest has waited between two ``run_delays``."""
    return max((delay - before.get(thread, 0) for thread, delay in delays.items()), default=0) / 1e9


class OwnTime:
    """A clock that stands still while processes wait for a processor: those of whichever thread waits longest count, up
    to ``MAX_WAIT_S`` in all.
    """

    MAX_WAIT_S = 30.0

    def __init__(self, *pids: int) -> None:
        self._began, self._before = time.monotonic(), {pid: run_delays(pid) for pid in pids}

    @property
    def elapsed_s(self) -> float:
        """Since it was made."""
        waited_s = max((longest_s(run_delays(pid), before) for pid, before in self._before.items()), default=0.0)
        return time.monotonic() - self._began - min(waited_s, self.MAX_WAIT_S)


def major_faults(pid: int) -> int:
    """How often a process has waited until a page of its memory was read from a disk; 0 once it has ended."""
    try:
        return int(stat_field(pid, MAJOR_FAULTS))
    except OSError:
        return 0


class Starvation:
    """The part of a process's silence in which one of its threads waited, counted from half of the patience on.

    So is the time in which its memory came back from swap: after days without work, that of a model may be gone.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] | None = None  # when it was first seen silent; None: it is not
        self._num_faults = 0  # at the last look, after this silence
        self._looked_at_s = 0.0
        self._paging_s = 0.0

    def of(self, pid: int, silent_s: float, patience_s: float) -> float:
        """Seconds. Called while it is silent and while it is not."""
        if silent_s < patience_s / 2:
            self._before = None
            return 0.0
        delays, num_faults = run_delays(pid), major_faults(pid)
        if self._before is None:
            self._before, self._paging_s = delays, 0.0
        elif num_faults > self._num_faults:
            self._paging_s += silent_s - self._looked_at_s
        self._num_faults, self._looked_at_s = num_faults, silent_s
        return longest_s(delays, self._before) + self._paging_s
