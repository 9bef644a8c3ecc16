"""How much memory may still be taken, in bytes."""

from __future__ import annotations

from pathlib import Path

import torch

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device, or of this machine within the limits of the control groups we are in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([_available_on_machine(), *_left_in_cgroups(_CGROUPS, Path("/proc/self/cgroup"))])


def _available_on_machine(meminfo: Path = Path("/proc/meminfo")) -> int:
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _left_in_cgroups(root: Path, membership: Path) -> list[int]:
    """Limit less use (page cache that can be dropped does not count) of our group and of those above it."""
    left = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            left += _left_above(root, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            left += _left_above(root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return left


def _left_above(root: Path, path: str, limit_file: str, use_file: str) -> list[int]:
    group = root / path.lstrip("/")
    groups = [group, *group.parents]
    return [
        int(limit) - int(use) + _droppable(folder)
        for folder in groups[: groups.index(root) + 1]
        if (limit := _read(folder / limit_file)).isdigit() and (use := _read(folder / use_file)).isdigit()
    ]


def _droppable(folder: Path) -> int:
    stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())
    return int(stat.get("inactive_file", 0))


def _read(file: Path) -> str:
    """The file's text, or nothing: a group above ours may be out of sight, and the root has no limit."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
