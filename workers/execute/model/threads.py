"""How many processors a step is worth."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from ....protocol.cgroups import Group, groups

# Parameters below which a step is too little work to share: a second thread gains nothing on an idle machine, and on a
# busy one each of the many small operators waits for it (1.2 M parameters, two busy cores: 13.7 ms against 0.7).
SMALL_MODEL = 20_000_000


class Worth(NamedTuple):
    """Multiplications of a step from which on it is worth something to the compiled kernels."""

    thread: int  # to wake another thread, which takes tens of microseconds
    team: int  # to share it, where threads wait for each other at every stage
    # Beyond this it is not worth planning behind it: that would hide about a millisecond, and whoever comes meanwhile
    # would wait for two such steps.
    ahead: int


# With 1.2 M parameters a step of 8 rows is worth a thread and no team, one of 32 rows with long contexts both. With
# 135 M, 32 rows take 25 to 35 ms, about the most that is planned behind, and a chunk of a prompt much longer.
WORTH = Worth(thread=12 << 20, team=48 << 20, ahead=4 << 30)


def num_threads(asked: int | None, num_parameters: int, *, num_ranks: int = 1) -> int:
    """As many as asked for. Otherwise torch's choice within the processors we may run on, shared by the ranks, or one
    for a small model.
    """
    if asked is not None:
        return asked
    if num_parameters < SMALL_MODEL:
        return 1
    return max(1, min(torch.get_num_threads(), num_processors()) // num_ranks)


def num_processors() -> int:
    """That this process may keep busy: those it may run on, within the quotas of its control groups.

    Threads that spin beyond a quota are all stopped for the rest of its period.
    """
    shares = [share for group in groups("cpu") if (share := _quota(group)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *shares])))


def _quota(group: Group) -> float | None:
    """Processors' worth of time that the group gets, or None for as much as there is."""
    if group.version == 2:
        quota, _, period = group.read("cpu.max").partition(" ")
    else:
        quota, period = group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
