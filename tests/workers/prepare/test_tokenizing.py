"""Suspects in prepare: who was working when it died, and who is known to end other workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.simulation.clock import installed
from tests.simulation.network import FakeTransport
from tests.simulation.processes import RUN_DIR, SimulatedContext, Worker
from tests.simulation.requests import encoder
from tests.simulation.world import World
from tests.waiting import eventually
from triptych.protocol.errors import Poisoned
from triptych.protocol.journal.deaths import POISONED
from triptych.workers.prepare.intake import INLINE_BYTES, Intake
from triptych.workers.prepare.quotas import Quotas
from triptych.workers.prepare.request import GenerationRequest
from triptych.workers.prepare.tokenizing import Result, Tokenizing

DIGEST = 7
LONG = INLINE_BYTES + 1


@pytest.fixture
def world() -> Iterator[World]:
    world = World(0)
    with installed(world.clock):
        yield world


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Until this is set a tokenizer beside is at work; the test ends with it set."""
    gate = threading.Event()
    yield gate
    gate.set()


def begin(world: World, results: list[Result]) -> Tokenizing:
    transport = FakeTransport(Worker(world, "prepare"))
    context = SimulatedContext("prepare", 1, RUN_DIR, world.config, world.board, world.journal, transport)
    quotas = Quotas(max_requests=9, max_bytes=1 << 20, max_unread=9)
    return Tokenizing(
        context, world.card, encoder(), quotas, ring=lambda: None, done=lambda _, result: results.append(result)
    )


def intake(digest: int = DIGEST, *, num_bytes: int = 64) -> Intake:
    request = GenerationRequest.from_wire({"prompt_token_ids": [1, 2, 3], "max_tokens": 1})
    return Intake(b"peer", b"owner", "a", digest, digest, num_bytes, request, 0)


def hold(tokenizing: Tokenizing, gate: threading.Event, patch: pytest.MonkeyPatch) -> None:
    """From now on each tokenizer waits for the gate before it begins."""
    tokenize = tokenizing._tokenize

    def wait_and_tokenize(intake: Intake) -> Result:
        gate.wait()
        return tokenize(intake)

    patch.setattr(tokenizing, "_tokenize", wait_and_tokenize)


def turn_until(tokenizing: Tokenizing, condition: Callable[[], object]) -> None:
    def turned() -> object:
        tokenizing.turn()
        return condition()

    eventually(turned)


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


def test_a_long_suspect_is_tokenised_beside_and_everybody_else_waits(
    world: World, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In line it would take longer than a hang may, and be blamed for the death of the process."""
    world.board.set_suspect(DIGEST, 1)
    results: list[Result] = []
    tokenizing = begin(world, results)
    hold(tokenizing, gate, monkeypatch)
    tokenizing.begin(intake(num_bytes=LONG))
    assert tokenizing.has_to_wait(DIGEST + 1), "it would be in the same hands"
    gate.set()
    turn_until(tokenizing, lambda: results)
    assert world.board.suspects() == {}
    assert not tokenizing.has_to_wait(DIGEST + 1)


def test_what_a_thread_that_was_given_up_works_on_stays_written_down(
    world: World, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    intent, results = world.board.intent("prepare"), list[Result]()
    intent.begin()
    tokenizing = begin(world, results)
    hold(tokenizing, gate, monkeypatch)
    monkeypatch.setattr(tokenizing._beside, "_timeout_s", 0.0)
    tokenizing.begin(intake(num_bytes=LONG))
    eventually(lambda: intent.read() == [DIGEST])
    world.clock.now_ns += 10**9
    tokenizing.turn()
    assert len(results) == 1, "it took too long"
    monkeypatch.setattr(tokenizing._beside, "_timeout_s", 60.0)
    tokenizing.begin(intake(DIGEST + 1, num_bytes=LONG))
    eventually(lambda: sorted(intent.read()) == [DIGEST, DIGEST + 1])
    gate.set()
    turn_until(tokenizing, lambda: len(results) == 2)
    eventually(lambda: intent.read() == [])
