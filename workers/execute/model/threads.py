"""How many processors to use for a step."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from ....protocol.cgroups import Group, groups

# Number of parameters below which a step is too little work to share: a second thread gains nothing on an idle machine,
# and on a busy one each of the many small operators waits for it (1.2 M parameters, two busy cores: 13.7 instead of
# 0.7 ms).
SMALL_MODEL = 20_000_000


class Thresholds(NamedTuple):
    """Thresholds of the compiled kernels, in multiplications per step."""

    thread: int  # from here on it pays to wake another thread, which takes tens of microseconds
    team: int  # from here on it pays to share the step, with threads waiting for each other at every stage
    # Beyond this, planning the next step during this one does not pay: it would hide about a millisecond, and a request
    # that arrives meanwhile would wait for two such steps.
    ahead: int


# With 1.2 M parameters, a step of 8 rows is worth a thread but no team, one of 32 rows with long contexts both. With
# 135 M, 32 rows take 25 to 35 ms, which is about the limit for planning ahead, and a chunk of a prompt much longer.
THRESHOLDS = Thresholds(thread=12 << 20, team=48 << 20, ahead=4 << 30)


def num_threads(asked: int | None, num_parameters: int, *, num_ranks: int = 1) -> int:
    """As many as ``asked`` for. Otherwise torch's choice, limited to the processors this process may use and divided
    among the ranks, or one for a small model.
    """
    if asked is not None:
        return asked
    if num_parameters < SMALL_MODEL:
        return 1
    return max(1, min(torch.get_num_threads(), num_processors()) // num_ranks)


def num_processors() -> int:
    """Processors that this process may keep busy: its CPU affinity, within the quotas of its control groups.

    If spinning threads exceed a quota, all are stopped for the rest of its period.
    """
    shares = [share for group in groups("cpu") if (share := _quota(group)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *shares])))


def _quota(group: Group) -> float | None:
    """CPU time that the group gets, in processors; None if unlimited."""
    if group.version == 2:
        quota, _, period = group.read("cpu.max").partition(" ")
    else:
        quota, period = group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
