"""ACCEPTED is sent after the flush to disk, and the driver's patience includes that wait."""

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
    """A world whose journal is on a disk."""
    world = World(0)
    world.config = replace(world.config, service=replace(world.config.service, journal="/disk", journal_flush="accept"))
    world.board.worker("prepare").set_patience(USUAL_NS)
    with installed(world.clock):
        yield world


def make_prepare(world: World, monkeypatch: pytest.MonkeyPatch, sent: list[m.Accepted]) -> Prepare:
    prepare = Worker(world, "prepare")._build()
    assert isinstance(prepare, Prepare)
    frames = iter([(b"peer", FRAME)])
    monkeypatch.setattr(prepare._router, "recv", lambda: next(frames, None))
    monkeypatch.setattr(prepare._router, "send", lambda _, message: sent.append(message))
    return prepare


def test_slow_flush_extends_the_patience_and_accepted_is_sent_after_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the usual patience the worker was killed, and the next one for the same disk."""
    sent, patience = list[m.Accepted](), list[int]()
    prepare, page = make_prepare(world, monkeypatch, sent), world.board.worker("prepare")

    def flush() -> None:
        assert not sent
        assert world.clock.monotonic_ns() - page.progress_ns < 1_000_000  # progress counts from here
        world.clock.advance_to(world.clock.now_ns + 4_000_000_000)
        patience.append(page.patience_ns)

    monkeypatch.setattr(prepare._context.journal, "flush", flush)
    prepare.turn()
    assert patience == [int(FLUSH_S * 1e9)]
    assert [message.request_id for message in sent] == ["a"]
    assert page.patience_ns == USUAL_NS
    assert world.clock.monotonic_ns() - page.progress_ns < 1_000_000


def test_failed_flush_resets_the_patience(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[m.Accepted]()
    prepare = make_prepare(world, monkeypatch, sent)

    def flush() -> None:
        raise JournalError("/disk cannot be written: Input/output error")

    monkeypatch.setattr(prepare._context.journal, "flush", flush)
    with pytest.raises(JournalError):
        prepare.turn()
    assert not sent
    assert world.board.worker("prepare").patience_ns == USUAL_NS
