"""Ends what a killed driver left: processes that were stopped (SIGSTOP) before they had tied themselves to it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from ..protocol.proc_stat import PARENT, is_stopped, stat_field

PACKAGE = __package__.rpartition(".")[0]
PROC = Path("/proc")

logger = logging.getLogger(__name__)


def end_orphans() -> None:
    """Kill this user's stopped processes of this package whose parent has ended. Continued, they would end themselves
    (``lifeline.die_with``): this does it for those that nobody continues.
    """
    for pid in _orphans():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            logger.info("ended process %d, left stopped by a driver that was killed", pid)


def _orphans() -> Iterator[int]:
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError):  # it has just ended, or is not ours
                if _is_orphan(folder, int(folder.name)):
                    yield int(folder.name)


def _is_orphan(folder: Path, pid: int) -> bool:
    if folder.stat().st_uid != os.getuid() or not is_stopped(pid):
        return False
    words = (folder / "cmdline").read_text(errors="replace").split("\0")
    if "-m" not in words or not words[words.index("-m") + 1].startswith(f"{PACKAGE}.") or "--parent" not in words:
        return False
    # In a container of its own, other numbers stand for its parent.
    is_here = (folder / "ns/pid").readlink() == (PROC / "self/ns/pid").readlink()
    return is_here and stat_field(pid, PARENT) != words[words.index("--parent") + 1]
