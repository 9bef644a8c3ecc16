"""ACCEPTED waits for the disk, and the driver waits with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.simulation.clock import installed
from tests.simulation.processes import Worker
from tests.simulation.world import World
from triptych.protocol import messages as m
from triptych.protocol.codec import encode
from triptych.protocol.errors import JournalError
from triptych.workers.prepare.process import Prepare
from triptych.workers.process import FLUSH_S

USUAL_NS = 7_000_000
FRAME = encode(m.Submit("a", {"prompt_token_ids": [1, 2, 3], "max_tokens": 1}))


@pytest.fixture
def world() -> Iterator[World]:
    """Its journal lies on a disk."""
    world = World(0)
    world.config = replace(world.config, service=replace(world.config.service, journal="/disk", journal_flush="accept"))
    world.board.worker("prepare").set_patience(USUAL_NS)
    with installed(world.clock):
        yield world


def make_prepare(world: World, monkeypatch: pytest.MonkeyPatch, said: list[m.Accepted]) -> Prepare:
    prepare = Worker(world, "prepare")._build()
    assert isinstance(prepare, Prepare)
    frames = iter([(b"peer", FRAME)])
    monkeypatch.setattr(prepare._router, "recv", lambda: next(frames, None))
    monkeypatch.setattr(prepare._router, "send", lambda _, message: said.append(message))
    return prepare


def test_a_slow_disk_is_waited_for_and_only_then_the_client_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the usual patience the worker was killed, and the next one for the same disk."""
    said, patience = list[m.Accepted](), list[int]()
    prepare, page = make_prepare(world, monkeypatch, said), world.board.worker("prepare")

    def flush() -> None:
        assert not said
        assert world.clock.monotonic_ns() - page.progress_ns < 1_000_000  # it counts from here
        world.clock.advance_to(world.clock.now_ns + 4_000_000_000)
        patience.append(page.patience_ns)

    monkeypatch.setattr(prepare._context.journal, "flush", flush)
    prepare.turn()
    assert patience == [int(FLUSH_S * 1e9)]
    assert [message.request_id for message in said] == ["a"]
    assert page.patience_ns == USUAL_NS
    assert world.clock.monotonic_ns() - page.progress_ns < 1_000_000


def test_a_disk_that_takes_nothing_leaves_no_patience_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[m.Accepted]()
    prepare = make_prepare(world, monkeypatch, said)

    def flush() -> None:
        raise JournalError("/disk cannot be written: Input/output error")

    monkeypatch.setattr(prepare._context.journal, "flush", flush)
    with pytest.raises(JournalError):
        prepare.turn()
    assert not said
    assert world.board.worker("prepare").patience_ns == USUAL_NS
