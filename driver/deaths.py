"""Why a worker died: by its own fault, or because somebody ended it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ..protocol.cgroups import groups

VMSTAT = Path("/proc/vmstat")
_SELF_INFLICTED = {
    signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS
}  # fmt: skip


class OomWatch:
    """Tells a SIGKILL of the kernel, which found no memory for this group of processes, from any other."""

    def __init__(self) -> None:
        self._read = next((read for read in _counters() if _num_kills(read()) is not None), str)
        self._count = _num_kills(self._read()) or 0

    def has_struck(self) -> bool:
        """Whether the kernel has killed somebody of this control group since the last call."""
        before, self._count = self._count, _num_kills(self._read()) or 0
        return self._count > before


def _counters() -> Iterator[Callable[[], str]]:
    """What may count the kills, the narrowest first: our control group, those above it, the machine."""
    for group in groups("memory"):
        yield partial(group.read, "memory.events" if group.version == 2 else "memory.oom_control")
    # NOTE: the kills of others count here too. So somebody may be suspected who did nothing; but where nothing is
    # counted, a request that takes all memory is never suspected, and run for ever.
    yield _read_vmstat


def _read_vmstat() -> str:
    try:
        return VMSTAT.read_text()
    except OSError:
        return ""


def _num_kills(text: str) -> int | None:
    """None where they are not counted: by the root group of version 2, and by kernels before 4.13."""
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), None)


def exit_code(process: subprocess.Popen[bytes], pidfd: int, *, phase: str) -> int:
    """How a process that has ended did so, negative for a signal; ``phase`` is the last that it showed.

    Where this program ignores SIGCHLD, or waits for every child, the code is lost, which ``Popen`` takes for a 0. Then
    what did not say that it has stopped has failed, for one that fails without an end would be started for ever.
    """
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        process.wait()
        return 0 if phase == "stopped" else 1
    return process.wait()


def is_internal(code: int, *, was_hung: bool, out_of_memory: bool) -> bool:
    """Whether an exit says something about what the worker was doing. ``code`` is negative for a signal."""
    if was_hung or code > 0:
        return True
    return -code in _SELF_INFLICTED or (-code == signal.SIGKILL and out_of_memory)


def is_stopped(pid: int) -> bool:
    """Whether somebody stopped the process (SIGSTOP, a debugger): then it makes no progress, and is not to blame."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
