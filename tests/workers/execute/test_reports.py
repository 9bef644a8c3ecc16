"""Reports to summarize: those of several short steps are combined, and none is delayed by a long step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.protocol.factories import accept, make_record
from tests.simulation.clock import installed
from tests.simulation.processes import Worker
from tests.simulation.world import World
from triptych.protocol.channels import Links
from triptych.protocol.intent import Intent
from triptych.protocol.journal.layout import split_word
from triptych.protocol.journal.requests import RequestWriter
from triptych.protocol.messages import StepDone
from triptych.workers.execute.engine import StepOutputs
from triptych.workers.execute.process import Execute
from triptych.workers.summarize.columns import Run, rows_of, runs_of

INTERVAL_NS = 10_000_000
STEP_NS = INTERVAL_NS // 10
PROMPT = [20, 21, 22]


class Sent:
    """When messages were sent to summarize, and their rows without the keys: index, token, finish reason."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times_ns: list[int] = []
        self.messages: list[list[tuple[int, ...]]] = []
        self.runs: list[Run] = []
        self._world = world
        monkeypatch.setattr(Links, "send", self._send)

    def _send(self, peer: str, message: Any) -> bool:
        assert peer == "summarize"
        assert isinstance(message, StepDone)
        self.times_ns.append(self._world.clock.now_ns)
        self.messages.append([row[2:] for row in rows_of(message)])
        self.runs += runs_of(message)
        return True


@pytest.fixture(params=[False, True], ids=["serial", "overlapped"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(0, overlaps=request.param, retains=False)
    world.plan.step_ns = (STEP_NS, STEP_NS + 1)
    set_report_interval(world, INTERVAL_NS / 1e6)
    world.card = replace(world.card, num_pages=200, max_model_len=120)
    with installed(world.clock):
        yield world


def set_report_interval(world: World, interval_ms: float) -> None:
    world.config = replace(world.config, service=replace(world.config.service, report_interval_ms=interval_ms))


def make_execute(world: World) -> Execute:
    worker = Worker(world, "execute")
    worker.body = execute = worker._build()
    assert isinstance(execute, Execute)
    return execute


def add(execute: Execute, world: World, *, num_tokens: int) -> None:
    writer = RequestWriter(world.journal)
    record = make_record(token_capacity=num_tokens, max_tokens=num_tokens, ignore_eos=True)
    view = accept(writer, world.journal, replace(record, prompt=np.array(PROMPT, "<i4").tobytes()))
    writer.dispatch(view.slot, view.generation, 5)
    execute._adopt(view.slot)


def work(execute: Execute) -> None:
    while execute._engine.has_work:
        execute.wait()
        execute.turn()


def test_short_steps_are_reported_together_and_no_token_later_than_the_interval(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, execute = Sent(world, monkeypatch), make_execute(world)
    known_at, collect = [], execute._engine.collect

    def collect_with_a_clock() -> StepOutputs:
        outputs = collect()
        known_at.extend([world.clock.now_ns] * len(outputs.progress.token_ids))
        return outputs

    monkeypatch.setattr(execute._engine, "collect", collect_with_a_clock)
    add(execute, world, num_tokens=60)
    work(execute)
    rows = [row for message in sent.messages for row in message]
    assert [index for index, _, _ in rows] == list(range(60))
    assert [reason > 0 for _, _, reason in rows] == [False] * 59 + [True]
    assert len(sent.messages[0]) == 1, "the first token is sent at once"
    assert len(sent.messages) < 12
    reported_at = [at for at, message in zip(sent.times_ns, sent.messages, strict=True) for _ in message]
    assert max(reported - known for reported, known in zip(reported_at, known_at, strict=True)) <= INTERVAL_NS


def test_tokens_of_a_sequence_from_several_steps_are_adjacent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """So summarize gets them as one run, which costs little more than a token."""
    sent, execute = Sent(world, monkeypatch), make_execute(world)
    for _ in range(3):
        add(execute, world, num_tokens=40)
    work(execute)
    assert len(sent.runs) < 40
    tokens: dict[int, int] = {}
    for run in sent.runs:
        assert run.start == tokens.get(run.slot, 0)
        tokens[run.slot] = run.start + len(run.token_ids)
    assert list(tokens.values()) == [40] * 3


@pytest.mark.parametrize(
    ("step_ns", "interval_ms"), [(INTERVAL_NS // 2 + 1, INTERVAL_NS / 1e6), (STEP_NS, 0.0)], ids=["long", "asked"]
)
def test_steps_are_reported_one_by_one_if_they_are_long_or_configured_so(
    world: World, monkeypatch: pytest.MonkeyPatch, step_ns: int, interval_ms: float
) -> None:
    world.plan.step_ns = (step_ns, step_ns + 1)
    set_report_interval(world, interval_ms)
    sent, execute = Sent(world, monkeypatch), make_execute(world)
    add(execute, world, num_tokens=20)
    work(execute)
    assert [len(message) for message in sent.messages] == [1] * 20


def test_ends_and_first_tokens_are_reported_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, execute = Sent(world, monkeypatch), make_execute(world)
    for num_tokens in (50, 9, 14):
        add(execute, world, num_tokens=num_tokens)
        for _ in range(6):
            execute.wait()
            execute.turn()
    steps_end_at = [record.began_at + record.elapsed_ns for record in execute._engine.history.last(100)]
    urgent = [
        at
        for at, message in zip(sent.times_ns, sent.messages, strict=True)
        if any(index == 0 or reason for index, _, reason in message)
    ]
    assert len(urgent) == 4
    assert all(any(end <= at < end + STEP_NS // 10 for end in steps_end_at) for at in urgent)


def test_reported_tokens_are_in_the_journal_and_flushed_if_configured(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = replace(world.config.service, journal="/disk", journal_flush="step")
    world.config = replace(world.config, service=service)
    sent, execute = Sent(world, monkeypatch), make_execute(world)
    num_on_disk, flushes_before = 0, list[int]()

    def flush() -> None:
        nonlocal num_on_disk
        num_on_disk = split_word(world.journal.tokens_words[0])[0]
        flushes_before.append(len(sent.messages))

    monkeypatch.setattr(execute._journal, "flush", flush)
    add(execute, world, num_tokens=60)
    while execute._engine.has_work:
        execute.wait()
        execute.turn()
        assert num_on_disk == sum(map(len, sent.messages))
    assert flushes_before == list(range(len(sent.messages))), "one per message, before it"


def test_all_pending_reports_are_written_before_a_request_is_adopted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The intent then does not say how many steps are lost if one in flight crashes."""
    execute, num_adopted = make_execute(world), 0
    begin_one = Intent.begin_one

    def begin_one_with_a_look(intent: Intent, key: int) -> None:
        nonlocal num_adopted
        num_adopted += 1
        assert not execute._books.num_unwritten
        begin_one(intent, key)

    monkeypatch.setattr(Intent, "begin_one", begin_one_with_a_look)
    for _ in range(3):
        add(execute, world, num_tokens=100)
        for _ in range(15):
            execute.turn()
    assert execute._books.num_unwritten
    assert num_adopted == 3


def test_no_report_is_held_back_while_a_prompt_is_computed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with a prompt may take a second, whatever the last ones took."""
    sent, execute = Sent(world, monkeypatch), make_execute(world)
    collect, num_prompts = execute._engine.collect, 0

    def collect_with_a_look() -> StepOutputs:
        nonlocal num_prompts
        if any(launched.plan.num_prefill_tokens for launched in execute._engine._in_flight):
            num_prompts += 1
            assert not execute._books.num_unwritten
            assert not execute._books._rows
        return collect()

    monkeypatch.setattr(execute._engine, "collect", collect_with_a_look)
    add(execute, world, num_tokens=100)
    for num_turns in range(31):
        execute.turn()
        if num_turns % 5 == 3:
            add(execute, world, num_tokens=2)
    assert num_prompts >= 6
    assert len(sent.messages) < 31
