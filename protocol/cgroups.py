"""The Linux control groups of this process, which limit the resources it may use."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


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


def _with_parents(root: Path, path: str, *, version: int) -> list[Group]:
    own = root / path.lstrip("/")
    folders = [own, *own.parents]
    return [Group(folder, version) for folder in folders[: folders.index(root) + 1]]
