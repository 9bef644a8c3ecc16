"""What summarize makes of what it finds in the journal, without any other process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.protocol.factories import TIMES, make_record
from tests.simulation.clock import installed
from tests.simulation.processes import Worker
from tests.simulation.world import World
from triptych.protocol.journal.deaths import DeathWriter
from triptych.protocol.journal.layout import UNREAD, word
from triptych.protocol.journal.releases import ReleaseWriter, is_released, read_end_code, read_release
from triptych.protocol.journal.requests import RequestWriter
from triptych.workers.summarize.process import Summarize

KEY = (0, 1)


@pytest.fixture
def world() -> Iterator[World]:
    """One request in its journal, dispatched; nobody lives yet."""
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


def poison(world: World) -> None:
    for _ in range(2):
        DeathWriter(world.journal).add("summarize", KEY[0] << 32 | KEY[1], is_alone=True)


def test_a_request_that_ended_it_twice_fails(world: World) -> None:
    poison(world)
    begin(world)
    assert read_release(world.journal, *KEY) == (0, "error")
    assert read_end_code(world.journal, *KEY) == "poisoned"


def test_an_end_that_is_written_stays_that_end_whatever_its_text_does(world: World) -> None:
    """Its credit and its pages were given back for that end, and a client may have it."""
    ReleaseWriter(world.journal).release(*KEY, num_tokens=2, reason="stop")
    poison(world)
    [answer] = begin(world)._answers.values()
    assert read_release(world.journal, *KEY) == (2, "stop")
    assert read_end_code(world.journal, *KEY) == ""
    assert answer.error is not None
    assert answer.error[0] == "poisoned"


LEASE_NS = int(make_record().lease_s * 1e9)


def turn_after(world: World, body: Summarize, nanoseconds: int) -> None:
    world.clock.advance_to(world.clock.now_ns + nanoseconds)
    body.turn()


def test_a_request_that_nobody_ever_asked_for_is_given_up_with_its_lease(world: World) -> None:
    """It is not kept for another one: its client was perhaps not told, and begins anew."""
    body = begin(world)
    turn_after(world, body, LEASE_NS // 2)
    assert not is_released(world.journal, *KEY)
    turn_after(world, body, LEASE_NS)
    assert int(world.journal.release_words[KEY[0]]) == word(KEY[1], UNREAD)


def test_the_lease_of_who_is_told_again_begins_again(world: World) -> None:
    body = begin(world)
    turn_after(world, body, LEASE_NS * 3 // 4)
    RequestWriter(world.journal).note_told(KEY[0], world.journal.now_ns())
    turn_after(world, body, LEASE_NS * 3 // 4)
    assert not is_released(world.journal, *KEY)
    turn_after(world, body, LEASE_NS // 2)
    assert is_released(world.journal, *KEY)
