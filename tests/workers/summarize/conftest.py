"""A summarize worker on a simulated journal, without other processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.protocol.factories import TIMES, make_record
from tests.simulation.clock import installed
from tests.simulation.processes import Worker
from tests.simulation.world import World
from triptych.protocol.journal.requests import RequestWriter
from triptych.workers.summarize.process import Summarize

KEY = (0, 1)


@pytest.fixture
def world() -> Iterator[World]:
    """One dispatched request in the journal; no worker runs yet."""
    world = World(0)
    with installed(world.clock):
        assert RequestWriter(world.journal).accept(make_record(), TIMES) == KEY
        RequestWriter(world.journal).dispatch(*KEY, 1)
        yield world


def begin(world: World) -> Summarize:
    worker = Worker(world, "summarize")
    body = worker._build()
    assert isinstance(body, Summarize)
    return body


def begin_search(world: World) -> list[tuple[int, int]]:
    """A beam search with two beams."""
    writer = RequestWriter(world.journal)
    records = [replace(make_record(f"b {i}", num_beams=2), index=i) for i in range(2)]
    keys = writer.accept_all(records, TIMES)
    for key in keys:
        writer.dispatch(*key, 1)
    return keys
