"""A summarize worker on a simulated journal, without other processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.protocol.factories import TIMES, make_record
from tests.simulation.clock import installed
from tests.simulation.processes import Worker
from tests.simulation.world import World
from triptych.protocol import messages as m
from triptych.protocol.codec import encode
from triptych.protocol.journal.requests import RequestWriter, read_request
from triptych.protocol.journal.tokens import TokenWriter
from triptych.workers.summarize.process import Summarize

KEY = (0, 1)
TURN_NS = 300_000_000  # a tick, and a little more


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


def turn_after(world: World, body: Summarize, nanoseconds: int) -> None:
    """Not at once: a process that has no turn for that long was stopped."""
    until_ns = world.clock.now_ns + nanoseconds
    while world.clock.now_ns < until_ns:
        world.clock.advance_to(min(world.clock.now_ns + TURN_NS, until_ns))
        body.turn()


def publish_tokens(world: World, *times_ns: int, slot: int = KEY[0]) -> None:
    """Let execute publish one token at each of these times."""
    view, tokens = read_request(world.journal, slot), TokenWriter(world.journal)
    assert view is not None
    num_known = len(tokens.adopt(view))
    for index, now_ns in enumerate(times_ns, num_known):
        if view.record.num_logprobs is not None:
            tokens.publish_logprobs(view, index, np.zeros(1, np.uint32))
        tokens.publish(np.array([slot]), np.array([index]), np.array([5], np.int32), now_ns)


def follow(body: Summarize) -> None:
    body._on_frame_safely(b"client", encode(m.Follow([["a", 0, True]])))
