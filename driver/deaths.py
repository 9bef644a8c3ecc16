"""Why a worker died: through its own fault, or because something killed it."""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..protocol.cgroups import groups
from ..protocol.system_calls import P_PIDFD
from ..protocol.threads import LIMITS
from .processes import Process

VMSTAT = Path("/proc/vmstat")
LOOK_S = 10.0  # between two looks at the counts of kills
RECENT_S = 60.0  # a large process may take long to end after its kill
STACKS_FOLLOW = "Fatal Python error: "  # what faulthandler writes first in a crash
# A worker ignores SIGINT as soon as it has imported numpy. OpenBLAS sends it before, to its own process, where it can
# start no thread.
_SELF_INFLICTED = {
    signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS,
    signal.SIGINT,
}  # fmt: skip
CROWDED = "may open no file for another client: raise the limit (ulimit -Hn)"
NO_THREADS = f"can start no thread: raise {LIMITS}"
# Of this package, of Python, of the C library and what uses it, and of OpenBLAS.
_NO_THREAD = (
    "no thread can be started",
    "can't start new thread",
    os.strerror(errno.EAGAIN),
    "OpenBLAS blas_thread_init",
)


class Death(NamedTuple):
    """Of one worker."""

    role: str
    code: int  # its exit code, negative for a signal
    is_internal: bool  # by its own fault
    out_of_memory: bool  # the kernel ended it for that


class OomWatch:
    """Tells a SIGKILL by the kernel's OOM killer, in our control group, from any other."""

    def __init__(self) -> None:
        self._read = next((read for read in _counters() if _num_kills(read()) is not None), str)
        self._count = _num_kills(self._read()) or 0
        self._looked_at, self._killed_at = time.monotonic(), -math.inf

    def look(self) -> None:
        """Notice kills of other processes, which say nothing about a worker that dies later. Called often."""
        if time.monotonic() - self._looked_at > LOOK_S:
            self._count_kills()

    def has_killed(self, code: int) -> bool:
        """Whether the OOM killer has killed the process that ended with this exit code: it has killed one of this
        control group in the last ``RECENT_S`` seconds, and since the last call.
        """
        self._count_kills()
        is_recent = self._looked_at - self._killed_at < RECENT_S
        self._killed_at = -math.inf
        return is_recent and code == -signal.SIGKILL

    def _count_kills(self) -> None:
        before, self._count = self._count, _num_kills(self._read()) or 0
        self._looked_at = time.monotonic()
        if self._count > before:
            self._killed_at = self._looked_at


def _counters() -> Iterator[Callable[[], str]]:
    """Sources of kill counts, the narrowest first: our control group, its ancestors, the machine."""
    for group in groups("memory"):
        yield partial(group.read, "memory.events" if group.version == 2 else "memory.oom_control")
    # NOTE: this also counts kills in other groups, so an innocent request may become a suspect. But with no count at
    # all, a request that uses up the memory would never be suspected, and be run forever.
    yield _read_vmstat


def _read_vmstat() -> str:
    try:
        return VMSTAT.read_text()
    except OSError:
        return ""


def _num_kills(text: str) -> int | None:
    """None where kills are not counted: in the root group of version 2, and by kernels before 4.13."""
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), None)


def exit_code(process: Process, pidfd: int, *, phase: str, log: str) -> int:
    """The exit code of an ended process, negative for a signal. ``phase`` is the last one it showed, ``log`` its last
    lines.

    If the host program ignores SIGCHLD or reaps every child, the code is lost and ``Popen`` reports 0. Then what the
    process has left behind tells: it has failed if it said so, showed the stacks of a crash, or never got as far as to
    show a phase; without any of this it was killed.
    """
    try:
        os.waitid(P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        process.wait()
        if phase == "stopped":
            return 0
        return 1 if phase in ("failed", "down") or STACKS_FOLLOW in log else -signal.SIGKILL
    return process.wait()


def is_internal(code: int, *, was_hung: bool, out_of_memory: bool) -> bool:
    """Whether an exit was caused by what the worker was doing. ``code`` is negative for a signal."""
    if was_hung or code > 0:
        return True
    return -code in _SELF_INFLICTED or out_of_memory


def what_was_lacking(code: int, log: str, *, was_ready: bool) -> str:
    """What the process died for lack of, if other processes have used it up: files or threads. No request is to blame
    then, and the next process may get it. Empty if it died of anything else.

    ``log``: its last lines. ``was_ready``: whether the pipeline ever was; a limit that keeps it from that is too low.
    """
    said = last_words(log)
    # ZeroMQ ends the process, as libzmq 4.3.5 does where it may open no file for one more connection.
    if code == -signal.SIGABRT and said.startswith(os.strerror(errno.EMFILE)):
        return CROWDED
    has_no_thread = code in (1, -signal.SIGABRT, -signal.SIGINT) and any(sign in said for sign in _NO_THREAD)
    return NO_THREADS if was_ready and has_no_thread else ""


def is_lack(error: OSError) -> bool:
    """Whether a process could not be started because others have what it needs."""
    return error.errno in (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def last_words(log: str) -> str:
    """The last line that a process wrote itself, before its stacks; the first line of these if there is no other."""
    said, _, stacks = log.rstrip("\n").partition(STACKS_FOLLOW)
    return said.rstrip("\n").rpartition("\n")[2] or (STACKS_FOLLOW + stacks.partition("\n")[0] if stacks else "")
