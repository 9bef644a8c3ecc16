"""Suspects in prepare: which request was being tokenised when it died, and which ones are poisoned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.simulation.clock import installed
from tests.simulation.network import FakeTransport
from tests.simulation.processes import RUN_DIR, SimulatedContext, Worker
from tests.simulation.requests import encoder
from tests.simulation.world import World
from tests.waiting import eventually
from triptych.protocol.errors import Poisoned, RequestError
from triptych.protocol.journal.deaths import POISONED
from triptych.workers.prepare.admission import Admission
from triptych.workers.prepare.intake import INLINE_BYTES, Intake
from triptych.workers.prepare.quotas import Quotas
from triptych.workers.prepare.request import GenerationRequest
from triptych.workers.prepare.tokenizing import Result, Tokenizing

DIGEST = 7
LONG = INLINE_BYTES + 1
MAX_WAITING_BYTES = 1 << 20  # of one client


@pytest.fixture
def world() -> Iterator[World]:
    world = World(0)
    with installed(world.clock):
        yield world


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A tokenizer in a helper thread works until this is set; it is set when the test ends."""
    gate = threading.Event()
    yield gate
    gate.set()


def begin(world: World, results: list[Result]) -> Tokenizing:
    transport = FakeTransport(Worker(world, "prepare"))
    context = SimulatedContext("prepare", 1, RUN_DIR, world.config, world.board, world.journal, transport)
    quotas = Quotas(max_requests=9, max_bytes=MAX_WAITING_BYTES, max_unread=9)
    return Tokenizing(
        context, world.card, encoder(), quotas, ring=lambda: None, done=lambda _, result: results.append(result)
    )


def intake(digest: int = DIGEST, *, num_bytes: int = 64, **fields: Any) -> Intake:
    request = GenerationRequest.from_wire({"prompt_token_ids": [1, 2, 3], "max_tokens": 1, **fields})
    return Intake(b"peer", b"owner", "a", digest, digest, num_bytes, request, 0)


def hold(tokenizing: Tokenizing, gate: threading.Event, patch: pytest.MonkeyPatch) -> None:
    """From now on, each tokenizer waits for the gate before it begins."""
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


class Panic(BaseException):
    """As raised for a panic of Rust code: not an Exception."""


@pytest.mark.parametrize("num_bytes", [64, LONG])
def test_panic_of_the_tokenizer_fails_only_its_request(
    world: World, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    def panic(*_: object) -> bool:
        raise Panic

    results: list[Result] = []
    tokenizing = begin(world, results)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizing._encoder, "is_continued", panic)
        tokenizing.begin(intake(num_bytes=num_bytes))
        turn_until(tokenizing, lambda: results)
    tokenizing.begin(intake(num_bytes=num_bytes))
    turn_until(tokenizing, lambda: len(results) == 2)
    assert isinstance(results[0], RequestError)
    assert results[0].message == "the request could not be prepared: Panic"
    assert isinstance(results[1], Admission)


def test_bytes_of_a_request_that_was_tokenised_no_longer_wait(world: World) -> None:
    """Neither in total nor for its client, which could send no more otherwise."""
    results: list[Result] = []
    tokenizing = begin(world, results)
    tokenizing.begin(intake(num_bytes=LONG))
    assert tokenizing.pending_bytes == LONG
    turn_until(tokenizing, lambda: results)
    assert tokenizing.pending_bytes == 0
    tokenizing._quotas.check(b"owner", MAX_WAITING_BYTES)


def test_suspect_tokenised_alone_without_a_crash_is_cleared(world: World) -> None:
    world.board.set_suspect(DIGEST, 1)
    results: list[Result] = []
    tokenizing = begin(world, results)
    assert not tokenizing.has_to_wait(DIGEST)
    tokenizing.begin(intake())
    assert len(results) == 1
    assert world.board.suspects() == {}


def test_suspect_waits_while_another_request_is_in_progress(world: World) -> None:
    world.board.set_suspect(DIGEST, 1)
    tokenizing = begin(world, [])
    tokenizing.pending_bytes = 1
    assert tokenizing.has_to_wait(DIGEST)
    assert not tokenizing.has_to_wait(DIGEST + 1)


def test_request_poisoned_while_prepare_runs_is_refused_from_then_on(world: World) -> None:
    tokenizing = begin(world, [])
    assert not tokenizing.has_to_wait(DIGEST)
    world.board.set_suspect(DIGEST, POISONED)
    with pytest.raises(Poisoned, match="same content"):
        tokenizing.has_to_wait(DIGEST)


def test_long_suspect_is_tokenised_in_a_helper_thread_while_all_others_wait(
    world: World, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the main thread it would take longer than the patience, and be blamed for the kill."""
    world.board.set_suspect(DIGEST, 1)
    results: list[Result] = []
    tokenizing = begin(world, results)
    hold(tokenizing, gate, monkeypatch)
    tokenizing.begin(intake(num_bytes=LONG))
    assert tokenizing.has_to_wait(DIGEST + 1), "it would be in progress at the same time"
    gate.set()
    turn_until(tokenizing, lambda: results)
    assert world.board.suspects() == {}
    assert not tokenizing.has_to_wait(DIGEST + 1)


def test_others_wait_while_a_suspect_with_a_form_waits_for_the_compiler(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be in progress when its turn comes: a crash would make suspects of them, and name nobody."""
    world.board.set_suspect(DIGEST, 1)
    results, compiled = list[Result](), list[Callable[[str], None]]()
    tokenizing = begin(world, results)
    monkeypatch.setattr(tokenizing._grammars, "compile", lambda owner, form, done: compiled.append(done))
    tokenizing.begin(intake(structured={"regex": "a"}))
    assert tokenizing.has_to_wait(DIGEST + 1)
    compiled[0]("start: /a/")
    tokenizing.turn()
    assert len(results) == 1
    assert world.board.suspects() == {}
    assert not tokenizing.has_to_wait(DIGEST + 1)


def test_intent_keeps_what_an_abandoned_thread_works_on(
    world: World, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    intent, results = world.board.intent("prepare"), list[Result]()
    intent.begin()
    tokenizing = begin(world, results)
    hold(tokenizing, gate, monkeypatch)
    monkeypatch.setattr(tokenizing._job_thread, "_timeout_s", 0.0)
    tokenizing.begin(intake(num_bytes=LONG))
    eventually(lambda: intent.read() == [DIGEST])
    world.clock.now_ns += 10**9
    tokenizing.turn()
    assert len(results) == 1, "it took too long"
    monkeypatch.setattr(tokenizing._job_thread, "_timeout_s", 60.0)
    tokenizing.begin(intake(DIGEST + 1, num_bytes=LONG))
    eventually(lambda: sorted(intent.read()) == [DIGEST, DIGEST + 1])
    gate.set()
    turn_until(tokenizing, lambda: len(results) == 2)
    eventually(lambda: intent.read() == [])
