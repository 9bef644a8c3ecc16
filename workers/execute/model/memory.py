"""How much memory may still be allocated, in bytes, and whether an error says that it was too little."""

from __future__ import annotations

from pathlib import Path

import torch

from ....protocol.cgroups import Group, groups

_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}

_TOO_LITTLE = ("out of memory", "STATUS_ALLOC_FAILED")  # from the driver and from libraries such as cuBLAS


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device had too little memory, at that moment."""
    return isinstance(error, torch.OutOfMemoryError) or any(said in str(error) for said in _TOO_LITTLE)


def available_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device, or of this machine within the limits of its control groups."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limited = [left for group in groups("memory") if (left := _left_in(group)) is not None]
    return min([_available_on_machine(), *limited])


def _available_on_machine(meminfo: Path = Path("/proc/meminfo")) -> int:
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _left_in(group: Group) -> int | None:
    """Limit minus usage, not counting page cache that can be dropped; None if there is no limit."""
    limit, use = (group.read(name) for name in _FILES[group.version])
    if not (limit.isdigit() and use.isdigit()):
        return None
    stat = dict(line.split(" ", 1) for line in group.read("memory.stat").splitlines())
    return int(limit) - int(use) + int(stat.get("inactive_file", 0))
