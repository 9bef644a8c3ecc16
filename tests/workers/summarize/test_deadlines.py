"""Deadlines of requests, without a pipeline around them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.protocol.factories import make_journal, make_record
from triptych.protocol.board import Board
from triptych.workers.summarize.deadlines import Deadlines


def make_deadlines(folder: Path) -> Deadlines:
    return Deadlines(make_journal(folder), Board(folder / "board"))


def add(deadlines: Deadlines, slot: int, **times: Any) -> None:
    deadlines.add((slot, 1), replace(make_record(), **times))


def test_wait_ends_at_the_next_deadline(tmp_path: Path) -> None:
    deadlines = make_deadlines(tmp_path)
    assert deadlines.wait_s(0, 0.25) == 0.25
    add(deadlines, 0, deadline_at=100_000_000, queue_deadline_at=30_000_000)
    assert (deadlines.wait_s(0, 0.25), deadlines.wait_s(40_000_000, 0.25)) == (0.03, 0.0)


def test_each_deadline_expires_once_and_in_order(tmp_path: Path) -> None:
    deadlines = make_deadlines(tmp_path)
    add(deadlines, 0, deadline_at=30)
    add(deadlines, 1, deadline_at=20, queue_deadline_at=10)
    assert [deadlines.due(now) for now in (5, 25, 25, 40)] == [[], [(1, 1), (1, 1)], [], [(0, 1)]]


def test_deadlines_of_ended_requests_do_not_accumulate(tmp_path: Path) -> None:
    deadlines = make_deadlines(tmp_path)
    for slot in range(1000):
        add(deadlines, slot, deadline_at=10**18)
        deadlines.tidy(lambda key: key[0] in (3, 999), num_live=2)
    assert len(deadlines) < 100
    assert sorted(deadlines.due(10**18))[0] == (3, 1)
