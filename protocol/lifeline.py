"""How a child process relates to its parent: the environment it is given, when it ends, and what it shows before."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Protocol

READY, FORK, GO = b"r", b"f", b"g"  # what a fork server says, what it is told, and what a process that it forked is
CANNOT_FORK = 3  # exit code of a fork server
PR_SET_PDEATHSIG = 1
SHOW_STACKS = signal.SIGUSR2
SHOW_S = 0.05  # for a hung process to show its stacks


def child_environment(*, computes: bool = False) -> dict[str, str]:
    """The parent's environment, with this package importable from a bare checkout too.

    From Python 3.11 on, it imports nothing from the working directory, as ``python -m`` would: what lies there may be
    named like a module. A process without heavy computation gets numpy without BLAS threads, which halves numpy's
    import time.
    """
    root = str(Path(sys.modules[__package__.partition(".")[0]].__file__ or "").absolute().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = {} if computes else {"OPENBLAS_NUM_THREADS": "1"}
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**threads, **os.environ, **fixed}


def die_with(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Be killed when the parent ends, even if it ended before this call."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, by) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def end_only_with(parent: int) -> None:
    """Be killed when the parent ends, which alone decides about this process: Ctrl-C and a service manager's SIGTERM,
    which reach the whole process group, are ignored.
    """
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def show_stacks_at_the_end() -> None:
    """Write the stacks of all threads to standard error in a crash, and if the parent ends this process as hung, even
    while native code runs.
    """
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS)


class Signalled(Protocol):
    """A process that this one has started, as ``subprocess.Popen``."""

    def send_signal(self, sig: int) -> None: ...


def ask_for_stacks(process: Signalled) -> None:
    """Give a hung process the time to show its stacks, before it is killed."""
    process.send_signal(SHOW_STACKS)
    time.sleep(SHOW_S)


def raise_file_limit() -> None:
    """Raise the open-file limit to the maximum: each client costs two, and ZeroMQ aborts a process that runs out."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
