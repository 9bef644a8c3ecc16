"""Which requests of an earlier process execute resumes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.protocol.factories import TIMES, accept, make_record
from tests.simulation.clock import installed
from tests.simulation.processes import Worker
from tests.simulation.world import World
from tests.workers.execute.factories import Told
from triptych.protocol.journal.deaths import DeathWriter, held_against
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import RequestView, RequestWriter
from triptych.protocol.journal.tokens import TokenWriter, read_finish
from triptych.protocol.record_key import number_of
from triptych.workers.execute.engine import StepOutputs
from triptych.workers.execute.process import Execute
from triptych.workers.execute.scheduling.sequence import Key
from triptych.workers.process import WorkerContext


@pytest.fixture
def world() -> Iterator[World]:
    world = World(0)
    with installed(world.clock):
        yield world


def dispatch(world: World, *, lora: str = "", lora_digest: str = "") -> RequestView:
    writer = RequestWriter(world.journal)
    record = make_record(num_prompt_tokens=3, token_capacity=8)
    record = replace(record, lora=lora, lora_digest=lora_digest)
    view = accept(writer, world.journal, record)
    writer.dispatch(view.slot, view.generation, 5)
    return view


def dispatch_beams(world: World, writer: RequestWriter | None = None) -> list[Key]:
    writer = writer or RequestWriter(world.journal)
    first = make_record(num_prompt_tokens=3, token_capacity=8, num_beams=2)
    keys = writer.accept_all([replace(first, request_id=f"a {index}", index=index) for index in range(2)], TIMES)
    for key in keys:
        writer.dispatch(*key, 5)
    return keys


def make_execute(world: World) -> Execute:
    worker = Worker(world, "execute")
    execute = worker.body = worker._build()
    assert isinstance(execute, Execute)
    return execute


def run(execute: Execute, *, num_turns: int) -> None:
    for _ in range(num_turns):
        execute._ticks.hasten()
        execute.turn()


def test_dispatched_requests_are_resumed(world: World) -> None:
    dispatch(world)
    execute = make_execute(world)
    execute._scan()
    assert execute._engine.has_work


def test_requests_are_resumed_in_order_of_arrival(world: World) -> None:
    writer = RequestWriter(world.journal)
    writer._free.reverse()  # later ones get earlier records
    keys = [writer.accept(make_record(f"r{index}"), TIMES) for index in range(3)]
    for key in keys:
        writer.dispatch(*key, 5)
    execute = make_execute(world)
    execute._scan()
    assert list(execute._held.items()) == keys
    assert keys != sorted(keys)


def test_request_whose_end_alone_was_not_written_ends_without_a_step(world: World) -> None:
    view, writer = dispatch(world), TokenWriter(world.journal)
    writer.adopt(view)
    for index in range(8):
        writer.publish(np.array([view.slot]), np.array([index]), np.array([5], np.int32), TIMES.accepted_ns)
    execute = make_execute(world)
    run(execute, num_turns=3)
    assert read_finish(world.journal, *view.key) == ("length", "")
    assert execute._num_steps == 0


def test_step_is_on_the_disk_before_it_is_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--journal-flush step``: after a power loss, a client would have text that the journal does not know."""
    events = list[str]()
    monkeypatch.setattr(WorkerContext, "flush_journal", lambda _: events.append("flush"))
    dispatch(world)
    execute = make_execute(world)
    execute._flushes = True
    monkeypatch.setattr(execute._reports, "send", lambda _: events.append("send"))
    run(execute, num_turns=12)
    assert events
    assert events == ["flush", "send"] * (len(events) // 2)


def test_requests_are_in_the_intent_until_their_step_is_recorded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose tokens cannot be recorded would end each process, and never be found."""
    view, seen = dispatch(world), list[list[int]]()
    execute = make_execute(world)
    record, intent = execute._books.record, world.board.intent("execute")

    def look_and_record(outputs: StepOutputs) -> None:
        seen.append(intent.read())
        record(outputs)

    monkeypatch.setattr(execute._books, "record", look_and_record)
    run(execute, num_turns=12)
    assert len(seen) >= 8
    assert all(numbers == [number_of(view.key)] for numbers in seen)


@pytest.mark.parametrize("reason", ["error", "stop", "length"])
def test_ended_requests_are_not_resumed(world: World, reason: str) -> None:
    """The record may be reused as soon as the end is known, and a step in flight would write into it."""
    view = dispatch(world)
    TokenWriter(world.journal).finish(view.slot, view.generation, reason)
    execute = make_execute(world)
    execute._scan()
    assert not execute._engine.has_work
    assert execute._held == {view.slot: view.generation}
    ReleaseWriter(world.journal).release(view.slot, view.generation, num_tokens=0, reason=reason)
    execute._scan()
    assert execute._held == {}


@pytest.mark.parametrize(
    ("lora", "digest", "is_served"),
    [("a", "digest of a", True), ("a", "digest of an earlier a", False), ("gone", "digest of gone", False)],
)
def test_request_of_an_unloaded_adapter_fails_with_the_reason(lora: str, digest: str, is_served: bool) -> None:
    """Even if another adapter has its name now."""
    world = World(0, adapters=True)
    with installed(world.clock):
        view = dispatch(world, lora=lora, lora_digest=digest)
        execute = make_execute(world)
        run(execute, num_turns=1)
        found = read_finish(world.journal, view.slot, view.generation)
    assert (found is None) == is_served
    assert found is None or (found[0], found[1].partition("\n")[2]) == (
        "error",
        f"the adapter {lora!r} is no longer served",
    )


def test_beam_search_that_survived_running_alone_is_resumed(world: World) -> None:
    """All of its beams are adopted again: otherwise the search would wait for the missing ones for ever."""
    keys = dispatch_beams(world)
    for slot, generation in keys:
        DeathWriter(world.journal).add("execute", (slot, generation), is_alone=False)
    run(make_execute(world), num_turns=20)
    assert [read_finish(world.journal, *key) for key in keys] == [("length", "")] * 2


@pytest.mark.parametrize("ahead", [0, 4])
def test_suspect_is_cleared_after_the_lost_steps_and_the_one_that_crashed(world: World, ahead: int) -> None:
    view = dispatch(world)
    key = view.key
    DeathWriter(world.journal).add("execute", key, is_alone=False, num_ahead=ahead)
    execute = make_execute(world)
    num_turns = 0
    while held_against(world.journal, "execute", *key):
        run(execute, num_turns=1)
        num_turns += 1
    assert num_turns == 1 + ahead


@pytest.mark.parametrize("is_suspect", [False, True])
def test_no_tokens_are_proposed_for_former_suspects(is_suspect: bool) -> None:
    """The crash may have been caused by a proposed token that would never have been sampled."""
    world = World(0, proposals=True)
    with installed(world.clock):
        view = dispatch(world)
        if is_suspect:
            DeathWriter(world.journal).add("execute", view.key, is_alone=False)
        execute = make_execute(world)
        execute._engine.scheduler.proposals._proposer = Told(lambda sequence, max_tokens: [1] * max_tokens)
        run(execute, num_turns=30)
    assert read_finish(world.journal, view.slot, view.generation) == ("length", "")
    assert (execute._engine.stats.num_proposed_tokens == 0) == is_suspect


def test_search_with_the_record_of_a_suspect_waits_until_all_its_beams_may_run(world: World) -> None:
    """If the beam were taken for the suspect, it would be run alone, which is impossible."""
    writer, releases = RequestWriter(world.journal), ReleaseWriter(world.journal)
    suspect = accept(writer, world.journal, make_record(num_prompt_tokens=3, token_capacity=8))
    writer.dispatch(suspect.slot, suspect.generation, 5)
    DeathWriter(world.journal).add("execute", suspect.key, is_alone=False)
    while writer.num_free > 1:  # so that the search gets the record of the suspect
        accept(writer, world.journal, make_record(f"b{writer.num_free}"))
    execute = make_execute(world)
    releases.release(suspect.slot, suspect.generation, num_tokens=0, reason="abort")
    releases.forget(suspect.slot, suspect.generation)
    TokenWriter(world.journal).finish(suspect.slot, suspect.generation, "abort")
    assert writer.recycle(suspect.slot, suspect.generation)
    keys = dispatch_beams(world, writer)
    assert suspect.slot in dict(keys)
    run(execute, num_turns=20)
    assert [read_finish(world.journal, *key) for key in keys] == [("length", "")] * 2
