"""A journal taken over with fewer rows than its requests were accepted for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.protocol.factories import TIMES, make_record
from tests.simulation.clock import installed
from tests.simulation.journal import make_journal
from tests.simulation.processes import Worker
from tests.simulation.world import World
from triptych.protocol.config import SchedulerConfig
from triptych.protocol.journal.requests import RequestWriter
from triptych.protocol.journal.tokens import read_finish
from triptych.protocol.request_ids import member_id

SCAN_NS = 300_000_000


@pytest.fixture
def world() -> Iterator[World]:
    world = World(0, overlaps=False)
    scheduler = SchedulerConfig(max_num_seqs=1)  # two of which may be live
    world.config = replace(world.config, scheduler=scheduler)
    world.card = replace(world.card, max_num_seqs=1, max_live=scheduler.max_live, num_pages=17, max_model_len=40)
    world.journal = make_journal(16, 1 << 16, clock_shift_ns=0)
    with installed(world.clock):
        yield world


def accept(world: World, request_id: str, **sampling: Any) -> list[tuple[int, int]]:
    first = make_record(request_id, token_capacity=3, ignore_eos=True, **sampling)
    size = first.params.group_size
    members = [replace(first, request_id=member_id(request_id, i, size), index=i) for i in range(size)]
    return RequestWriter(world.journal).accept_all(members, TIMES)


def run_until_ended(world: World, keys: list[tuple[int, int]]) -> list[tuple[str, str]]:
    workers = [Worker(world, role) for role in ("prepare", "execute", "summarize")]
    for worker in workers:
        worker.body = worker._build()
    for _ in range(200):
        for worker in workers:
            worker.body.turn()
        world.clock.advance_to(world.clock.now_ns + SCAN_NS)
        ends = [read_finish(world.journal, *key) for key in keys]
        if None not in ends:
            return [end for end in ends if end is not None]
    raise AssertionError(f"still {ends}")


def test_group_too_large_for_all_rows_is_served_in_turns(world: World) -> None:
    group, next_one = accept(world, "group", n=4), accept(world, "next")
    assert run_until_ended(world, group + next_one) == [("length", "")] * 5


def test_too_large_beam_search_fails_and_blocks_no_one(world: World) -> None:
    """Its beams can only continue together."""
    search, next_one = accept(world, "search", num_beams=4), accept(world, "next")
    *beams, last = run_until_ended(world, search + next_one)
    why = "model_failed\nnum_beams is 4, which was accepted for more rows; the limit is max_live, 2, now"
    assert ("error", why) in beams
    assert {reason for reason, _ in beams} <= {"error", "abort"}
    assert last == ("length", "")
