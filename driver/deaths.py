"""Why a worker died: by its own fault, or because somebody ended it."""

from __future__ import annotations

import signal
from pathlib import Path

_SELF_INFLICTED = {
    signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS
}  # fmt: skip


class OomWatch:
    """Tells a SIGKILL of the kernel, which found no memory for this group of processes, from any other."""

    def __init__(self, events: Path | None = None) -> None:
        self._events = events or _memory_events()
        self._count = self._read()

    def has_struck(self) -> bool:
        """Whether the kernel has killed somebody of this control group since the last call."""
        before, self._count = self._count, self._read()
        return self._count > before

    def _read(self) -> int:
        if self._events is None:
            return 0
        try:
            lines = self._events.read_text().splitlines()
        except OSError:
            return 0
        counts = dict(line.split() for line in lines if len(line.split()) == 2)
        return int(counts.get("oom_kill", 0))


def _memory_events() -> Path | None:
    """``memory.events`` of this process' control group (version 2), or None where there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    group = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if group is None:
        return None
    root = Path("/sys/fs/cgroup")
    inside, outside = root / group.lstrip("/") / "memory.events", root / "memory.events"
    return next((path for path in (inside, outside) if path.exists()), None)


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
