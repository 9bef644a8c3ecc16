"""Suspects in prepare: who was working when it died, and who is known to end other workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.clock import installed
from tests.simulation.network import FakeTransport
from tests.simulation.processes import RUN_DIR, LifeContext, Worker
from tests.simulation.requests import encoder
from tests.simulation.world import World
from triptych.protocol.errors import Poisoned
from triptych.protocol.journal.deaths import POISONED
from triptych.workers.prepare.intake import Intake
from triptych.workers.prepare.quotas import Quotas
from triptych.workers.prepare.request import GenerationRequest
from triptych.workers.prepare.tokenizing import Result, Tokenizing

DIGEST = 7


@pytest.fixture
def world() -> Iterator[World]:
    world = World(0)
    with installed(world.clock):
        yield world


def begin(world: World, results: list[Result]) -> Tokenizing:
    transport = FakeTransport(Worker(world, "prepare"))
    context = LifeContext("prepare", 1, RUN_DIR, world.config, world.board, world.journal, transport)
    quotas = Quotas(max_requests=9, max_bytes=1 << 20)
    return Tokenizing(
        context, world.card, encoder(), quotas, ring=lambda: None, done=lambda _, result: results.append(result)
    )


def intake() -> Intake:
    request = GenerationRequest.from_wire({"prompt_token_ids": [1, 2, 3], "max_tokens": 1})
    return Intake(b"peer", b"owner", "a", DIGEST, 64, request, 0)


def test_a_suspect_that_is_tokenised_alone_and_does_no_harm_is_none_any_more(world: World) -> None:
    world.board.set_suspect(DIGEST, 1)
    results: list[Result] = []
    tokenizing = begin(world, results)
    assert not tokenizing.has_to_wait(DIGEST)
    tokenizing.begin(intake())
    assert len(results) == 1
    assert world.board.suspects() == {}


def test_a_suspect_waits_while_something_else_is_on_its_way(world: World) -> None:
    world.board.set_suspect(DIGEST, 1)
    tokenizing = begin(world, [])
    tokenizing.pending_bytes = 1
    assert tokenizing.has_to_wait(DIGEST)
    assert not tokenizing.has_to_wait(DIGEST + 1)


def test_what_is_named_while_prepare_lives_is_refused_from_then_on(world: World) -> None:
    tokenizing = begin(world, [])
    assert not tokenizing.has_to_wait(DIGEST)
    world.board.set_suspect(DIGEST, POISONED)
    with pytest.raises(Poisoned, match="same content"):
        tokenizing.has_to_wait(DIGEST)
