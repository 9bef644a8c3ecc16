"""What /proc says about processes, and how much memory this one may take."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def is_alive(pid: int | None) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> list[int]:
    """Processes that any thread of ``pid`` started and that it has not waited for."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def fork_servers_of(run_dir: Path) -> list[int]:
    """The processes that fork workers in a pipeline of this process; other drivers in it have others."""
    found = []
    for child in children_of(os.getpid()):
        with suppress(OSError):  # it has just ended
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            if "triptych.workers.fork_server" in words and str(run_dir) in words:
                found.append(child)
    return found


@contextmanager
def address_space(num_bytes: int) -> Iterator[None]:
    """Limit the address space to this much more than now; the system may promise more memory than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
