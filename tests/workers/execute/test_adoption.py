"""Which requests of an earlier life execute goes on with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.protocol.factories import accept, make_record
from tests.simulation.clock import installed
from tests.simulation.processes import Worker
from tests.simulation.world import World
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import RequestView, RequestWriter
from triptych.protocol.journal.tokens import TokenWriter
from triptych.workers.execute.process import Execute


@pytest.fixture
def world() -> Iterator[World]:
    world = World(0)
    with installed(world.clock):
        yield world


def dispatch(world: World) -> RequestView:
    writer = RequestWriter(world.journal)
    view = accept(writer, world.journal, make_record(num_prompt_tokens=3, token_capacity=8))
    writer.dispatch(view.slot, view.generation, 5)
    return view


def make_execute(world: World) -> Execute:
    execute = Worker(world, "execute")._build()
    assert isinstance(execute, Execute)
    return execute


def test_what_was_dispatched_goes_on(world: World) -> None:
    dispatch(world)
    execute = make_execute(world)
    execute._scan()
    assert execute._engine.has_work


@pytest.mark.parametrize("reason", ["error", "stop", "length"])
def test_what_has_ended_does_not_go_on(world: World, reason: str) -> None:
    """Its record may be used again as soon as the end is known, and a step in flight would write into it."""
    view = dispatch(world)
    TokenWriter(world.journal).finish(view.slot, view.generation, reason)
    execute = make_execute(world)
    execute._scan()
    assert not execute._engine.has_work
    assert execute._held == {view.slot: view.generation}
    ReleaseWriter(world.journal).release(view.slot, view.generation, num_tokens=0, reason=reason)
    execute._scan()
    assert execute._held == {}
