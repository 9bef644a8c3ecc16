"""The journal's clock continues after a reboot: no time that it showed comes again, and damaged times do not set it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.protocol.crashing import Died, MortalJournal, StoreCounter
from tests.protocol.factories import TIMES, filled, lose_tokens, make_journal, make_record, read
from triptych.protocol.journal.clock import wind_clock
from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.requests import RequestWriter, read_request
from triptych.protocol.journal.salvage import salvage
from triptych.protocol.journal.tokens import TokenWriter


def test_clock_continues_over_a_reboot(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    assert wind_clock(journal, boot_id="first") == 0
    journal.close()
    journal = Journal.open(tmp_path / "journal")
    before = journal.now_ns()
    journal.header["wall_offset_ns"] -= 3600 * 10**9  # by the wall clock, the machine booted an hour later
    moved = wind_clock(journal, boot_id="second")
    assert 3599 * 10**9 < moved < 3601 * 10**9
    journal.close()
    assert Journal.open(tmp_path / "journal").now_ns() - before >= moved


def test_clock_of_every_boot_adds_the_time_that_the_machine_was_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = {"time_ns": 0, "monotonic_ns": 0}
    for name in now_s:
        monkeypatch.setattr(time, name, lambda name=name: now_s[name] * 10**9)
    journal, moved_s, shown_s = make_journal(tmp_path), [], []
    for boot, wall_s, up_s in (("a", 1000, 500), ("b", 1100, 10), ("b", 1105, 15), ("c", 1200, 20)):
        now_s.update(time_ns=wall_s, monotonic_ns=up_s)
        moved_s.append(wind_clock(journal, boot_id=boot) / 10**9)
        shown_s.append(up_s + int(journal.header["clock_shift_ns"]) / 10**9)
    assert (moved_s, shown_s) == ([0, 590, 0, 90], [500, 600, 605, 700])


@pytest.mark.parametrize("field", ["dispatched_ns", "told_ns", "scheduled_ns"])
def test_time_that_cannot_be_does_not_set_the_clock(tmp_path: Path, field: str) -> None:
    """A damaged one: no checksum covers these."""
    journal = filled(tmp_path)
    wind_clock(journal, boot_id="first")
    journal.records[field][1] = 2**64 - 1
    assert salvage(journal) == []
    wind_clock(journal, boot_id="second")
    assert abs(int(journal.header["clock_shift_ns"])) < 10**9


def test_wall_clock_that_was_set_back_does_not_reverse_time(tmp_path: Path) -> None:
    journal, future = make_journal(tmp_path), time.monotonic_ns() + 10**15
    RequestWriter(journal).accept(make_record(), replace(TIMES, accepted_ns=future))
    wind_clock(journal, boot_id="first")
    journal.header["wall_offset_ns"] += 10**16
    wind_clock(journal, boot_id="second")
    journal.close()
    assert Journal.open(tmp_path / "journal").now_ns() >= future


@pytest.mark.parametrize("num_stores", range(4))
def test_driver_killed_while_it_winds_the_clock_does_not_wind_it_twice(tmp_path: Path, num_stores: int) -> None:
    """Deadlines would pass that have not: after a long uptime, by months."""
    journal = make_journal(tmp_path)
    wind_clock(journal, boot_id="first")
    journal.header["wall_offset_ns"] -= 3600 * 10**9
    mortal = MortalJournal(journal, StoreCounter(end=num_stores))
    if num_stores < 3:
        with pytest.raises(Died):
            wind_clock(mortal, boot_id="second")
    wind_clock(journal, boot_id="second")
    assert int(journal.header["clock_shift_ns"]) < 3601 * 10**9


@pytest.mark.parametrize("num_stores", range(3))
def test_driver_killed_while_it_winds_the_clock_does_not_reverse_time(tmp_path: Path, num_stores: int) -> None:
    journal, future = make_journal(tmp_path), time.monotonic_ns() + 10**15
    RequestWriter(journal).accept(make_record(), replace(TIMES, accepted_ns=future))
    wind_clock(journal, boot_id="first")
    with pytest.raises(Died):
        wind_clock(MortalJournal(journal, StoreCounter(end=num_stores)), boot_id="second")
    wind_clock(journal, boot_id="second")
    journal.close()
    assert Journal.open(tmp_path / "journal").now_ns() >= future


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_tokens_and_steps_before_a_reboot_are_earlier_than_those_after_it(tmp_path: Path, num_tokens: int) -> None:
    journal, now_ns = make_journal(tmp_path), time.monotonic_ns()
    RequestWriter(journal).accept(make_record(), replace(TIMES, accepted_ns=now_ns))
    wind_clock(journal, boot_id="first")
    view, writer = read_request(journal, 0), TokenWriter(journal)
    assert view is not None
    writer.adopt(view)
    writer.add_times(0, scheduled_ns=now_ns + 10**12)
    for index in range(num_tokens):
        writer.publish(np.array([0]), np.array([index]), np.array([5], np.int32), now_ns + (index + 2) * 10**12)
    journal.header["wall_offset_ns"] += 10**16
    wind_clock(journal, boot_id="second")
    journal.close()
    assert Journal.open(tmp_path / "journal").now_ns() >= now_ns + (num_tokens + 1) * 10**12


def test_times_that_did_not_reach_the_disk_do_not_set_the_clock(tmp_path: Path) -> None:
    """They look like times half a day ahead: every deadline would pass."""
    journal, now_ns = make_journal(tmp_path), time.monotonic_ns()
    writer, tokens = RequestWriter(journal), TokenWriter(journal)
    view = read(journal, writer.accept(make_record(), replace(TIMES, accepted_ns=now_ns - 10**12)))
    wind_clock(journal, boot_id="first")
    tokens.adopt(view)
    for index in range(3):
        tokens.publish(np.array([0]), np.array([index]), np.array([5], np.int32), now_ns - 10**12 + index * 10**9)
    lose_tokens(journal, view, "times_at")
    journal.words[view.extent.times_at] = 5
    assert wind_clock(journal, boot_id="second") < 3600 * 10**9


def test_without_a_reboot_no_time_is_changed(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    assert [wind_clock(journal, boot_id="same") for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("is_ahead", "wall_moved_ns", "expected_ns"),
    [(True, 10**15, 10**15), (False, 10**15, 0), (True, 0, 0)],
    ids=["reset", "only the wall clock was set", "only a time is ahead, as a damaged one"],
)
def test_clock_that_was_reset_under_the_same_boot_id_continues(
    tmp_path: Path, is_ahead: bool, wall_moved_ns: int, expected_ns: int
) -> None:
    """As in a sandbox or on a machine whose boot id never changes, or after a return to a snapshot of a machine."""
    journal = make_journal(tmp_path)
    accepted_ns = time.monotonic_ns() + (10**15 - 3600 * 10**9 if is_ahead else 0)
    RequestWriter(journal).accept(make_record(), replace(TIMES, accepted_ns=accepted_ns))
    wind_clock(journal, boot_id="same")
    journal.header["wall_offset_ns"] -= wall_moved_ns
    assert wind_clock(journal, boot_id="same") == pytest.approx(expected_ns, abs=10**9)
