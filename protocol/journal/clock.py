"""The journal's clock: CLOCK_MONOTONIC, continued across reboots.

CLOCK_MONOTONIC restarts at every boot, which would make the times of a journal on disk meaningless. The header keeps
how far the journal's clock is ahead of it. The time the machine was off is taken from the wall clock: it is as exact as
that one, and never lets the journal's clock run backwards.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from .layout import FREE, Journal
from .requests import RequestView, read_request
from .tokens import read_times, read_tokens

_MAX_NS = 1 << 62  # 146 years
_MAX_GAP_NS = 6 * 3600 * 10**9  # between two tokens: a time that did not reach the disk looks like 11.9 hours
_LEAST_LAG_NS = 10**9  # the clocks drift apart by less, unless someone sets one or the machine sleeps
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def wind_clock(journal: Journal, *, boot_id: str | None = None) -> int:
    """Continue the clock in this boot. Called by the driver, before any other process opens the journal.

    Returns the nanoseconds by which it was moved: 0 unless the machine was rebooted.
    """
    boot = (boot_id or _read_boot_id()).encode()
    header = journal.header
    offset = time.time_ns() - time.monotonic_ns()
    before = int(header["clock_shift_ns"])
    lag_ns = offset - int(header["wall_offset_ns"])  # by how much CLOCK_MONOTONIC fell behind the wall clock
    # NOTE: before the shift. If the driver is killed in between, the next one misses the time the machine was off; the
    # other way round, it would add the whole time between the two boots twice.
    header["wall_offset_ns"] = offset
    if header["boot_id"] and (bytes(header["boot_id"]) != boot or _was_reset(journal, lag_ns)):
        header["clock_shift_ns"] = max(before + lag_ns, _latest_ns(journal) - time.monotonic_ns())
    header["boot_id"] = boot
    return int(header["clock_shift_ns"]) - before


def _was_reset(journal: Journal, lag_ns: int) -> bool:
    """Whether CLOCK_MONOTONIC began anew under the same boot id: some systems have none that changes, and a machine may
    return to a snapshot. A time ahead of the clock alone proves nothing, as it may be damaged.
    """
    return lag_ns > _LEAST_LAG_NS and _latest_ns(journal) > journal.now_ns()


def _read_boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # a system without boot ids
        return "unknown"


def _latest_ns(journal: Journal) -> int:
    """The latest time found in any record. A damaged one, which no checksum covers, must not set the clock."""
    in_use = journal.states() != FREE
    columns = [journal.records[name][in_use] for name in ("dispatched_ns", "scheduled_ns", "told_ns")]
    times = [time_ns for column in (journal.records["accepted_ns"], *columns) for time_ns in column.tolist()]
    views = (read_request(journal, slot) for slot in np.flatnonzero(in_use).tolist())
    times += [_last_token_ns(journal, view) for view in views if view is not None]
    return max((time_ns for time_ns in times if 0 <= time_ns < _MAX_NS), default=0)


def _last_token_ns(journal: Journal, view: RequestView) -> int:
    tokens = read_tokens(journal, view)
    times_ns = read_times(journal, view, 0 if tokens is None else len(tokens)).tokens_ns
    gaps_ns = np.diff(times_ns, prepend=view.accepted_ns)
    return int(times_ns[-1]) if len(times_ns) and gaps_ns.max() < _MAX_GAP_NS else 0
