"""The journal's clock: CLOCK_MONOTONIC, and one that goes on over a reboot.

CLOCK_MONOTONIC begins anew with every boot, so the times of a journal that lies on disk would mean nothing afterwards.
The header keeps by how much the journal's clock is ahead of it. The time the machine was off is taken from the wall
clock: it is as exact as that one, and never makes the journal's clock go back.
"""

from __future__ import annotations

import time
from pathlib import Path

from .layout import FREE, Journal

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def wind_clock(journal: Journal, *, boot_id: str | None = None) -> int:
    """Let the clock go on in this boot. For the driver, before anybody else opens the journal.

    Returns the nanoseconds by which it was moved: 0 unless the machine was booted since.
    """
    boot = (boot_id or _read_boot_id()).encode()
    header = journal.header
    offset = time.time_ns() - time.monotonic_ns()
    before = int(header["clock_shift_ns"])
    if header["boot_id"] and bytes(header["boot_id"]) != boot:
        since_last_boot = before - int(header["wall_offset_ns"]) + offset
        header["clock_shift_ns"] = max(since_last_boot, _latest_ns(journal) - time.monotonic_ns())
    header["wall_offset_ns"] = offset
    header["boot_id"] = boot
    return int(header["clock_shift_ns"]) - before


def _read_boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # a system without it
        return "unknown"


def _latest_ns(journal: Journal) -> int:
    in_use = journal.states() != FREE
    return int(
        max(journal.records["dispatched_ns"][in_use].max(initial=0), journal.records["accepted_ns"].max(initial=0))
    )
