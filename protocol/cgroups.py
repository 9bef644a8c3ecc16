"""The Linux control groups of this process, which limit the resources it may use."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes"), 2: ("memory.max", "memory.peak")}
_NO_LIMIT_BYTES = 1 << 60  # version 1 shows such a number where there is none


class Group(NamedTuple):
    """A control group, as a folder of files."""

    folder: Path
    version: int  # 1 | 2: the file names differ

    def read(self, name: str) -> str:
        """The file's text, or "": a parent group may be invisible, and the root group has no limits."""
        try:
            return (self.folder / name).read_text().strip()
        except OSError:
            return ""


def groups(controller: str) -> list[Group]:
    """Our group for ``controller`` ("memory", "cpu") and its ancestors; each may set a limit of its own.

    Empty on a kernel without control groups.
    """
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _with_parents(ROOT, path, version=2)
        elif controller in controllers.split(","):
            found += _with_parents(ROOT / controller, path, version=1)
    return found


def memory_ran_out() -> str:
    """Words for that, with the smallest limit of a control group, if there is one, and how much was used at most."""
    found = []
    for group in groups("memory"):
        limit, peak = (group.read(name) for name in _MEMORY_FILES[group.version])
        if limit.isdigit() and int(limit) < _NO_LIMIT_BYTES:
            found.append((int(limit), f", peak {int(peak) >> 20} MiB" if peak.isdigit() else ""))
    if not found:
        return "memory ran out"
    num_bytes, peak = min(found)
    return f"memory ran out (limit {num_bytes >> 20} MiB{peak})"


def _with_parents(root: Path, path: str, *, version: int) -> list[Group]:
    own = root / path.lstrip("/")
    folders = [own, *own.parents]
    return [Group(folder, version) for folder in folders[: folders.index(root) + 1]]
