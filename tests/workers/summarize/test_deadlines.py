"""Deadlines of requests, without other processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.protocol.factories import TIMES, make_journal, make_record
from tests.simulation.world import World
from tests.workers.summarize.conftest import KEY, begin, turn_after
from triptych.protocol.board import Board
from triptych.protocol.journal.releases import ReleaseWriter, is_released
from triptych.protocol.journal.requests import RequestWriter, read_request
from triptych.protocol.journal.tokens import TokenWriter
from triptych.workers.summarize.deadlines import Deadlines

SECOND_NS = 10**9


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


def test_deadline_of_an_earlier_request_does_not_end_the_next(world: World) -> None:
    body = begin(world)
    body._deadlines.add((KEY[0], KEY[1] - 1), replace(make_record(), deadline_at=1))
    body.turn()
    assert not is_released(world.journal, *KEY)


@pytest.mark.parametrize("is_dispatched", [False, True])
@pytest.mark.parametrize("is_ready", [False, True])
def test_queue_limit_is_enforced_where_execute_does_not(world: World, is_dispatched: bool, is_ready: bool) -> None:
    ReleaseWriter(world.journal).forget(*KEY)
    writer, deadline_at = RequestWriter(world.journal), world.journal.now_ns() + SECOND_NS
    key = writer.accept(replace(make_record("b"), queue_deadline_at=deadline_at), TIMES)
    if is_dispatched:
        writer.dispatch(*key, 1)
    if is_ready:
        world.board.worker("execute").set_phase(world.board.epoch("execute"), "ready")
    body = begin(world)
    turn_after(world, body, SECOND_NS // 2)
    assert not is_released(world.journal, *key)
    turn_after(world, body, SECOND_NS)
    assert is_released(world.journal, *key) == (not (is_dispatched and is_ready))


def test_queue_limit_is_met_for_all_sequences_by_the_first_one_to_start(world: World) -> None:
    """Even while execute is down, so that no other process checks deadlines."""
    writer, deadline_at = RequestWriter(world.journal), world.journal.now_ns() + SECOND_NS
    records = [replace(make_record(f"b {i}", n=2), index=i, queue_deadline_at=deadline_at) for i in range(2)]
    keys = writer.accept_all(records, TIMES)
    for key in keys:
        writer.dispatch(*key, 1)
    view, tokens = read_request(world.journal, keys[0][0]), TokenWriter(world.journal)
    assert view is not None
    tokens.adopt(view)
    tokens.add_times(view.slot, scheduled_ns=world.journal.now_ns())
    body = begin(world)
    turn_after(world, body, 2 * SECOND_NS)
    assert not [key for key in keys if is_released(world.journal, *key)]
