"""What summarize hears of short steps: several at once, and nothing late where the next step takes long."""

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
from triptych.protocol.journal.requests import RequestWriter
from triptych.protocol.messages import StepDone
from triptych.workers.execute.engine import StepOutputs
from triptych.workers.execute.process import SHORT_STEP_NS, Execute
from triptych.workers.execute.reports import MIN_INTERVAL_S
from triptych.workers.summarize.columns import rows_of

STEP_NS = SHORT_STEP_NS // 5
PROMPT = [20, 21, 22]


class Sent:
    """When messages went to summarize, and their rows without the keys: index, token, finish reason."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times_ns: list[int] = []
        self.messages: list[list[tuple[int, ...]]] = []
        self._world = world
        monkeypatch.setattr(Links, "send", self._send)

    def _send(self, peer: str, message: Any) -> bool:
        assert peer == "summarize"
        assert isinstance(message, StepDone)
        self.times_ns.append(self._world.clock.now_ns)
        self.messages.append([row[2:] for row in rows_of(message)])
        return True


@pytest.fixture(params=[False, True], ids=["serial", "overlapped"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(0, overlaps=request.param)
    world.plan.step_ns = (STEP_NS, STEP_NS + 1)
    world.card = replace(world.card, num_pages=200, max_model_len=120)
    with installed(world.clock):
        yield world


def begin(world: World) -> Execute:
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


def test_short_steps_are_told_once_a_millisecond(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, execute = Sent(world, monkeypatch), begin(world)
    add(execute, world, num_tokens=60)
    while execute._engine.has_work:
        execute.wait()
        execute.turn()
    rows = [row for message in sent.messages for row in message]
    assert [index for index, _, _ in rows] == list(range(60))
    assert [reason > 0 for _, _, reason in rows] == [False] * 59 + [True]
    assert len(sent.messages[0]) == 1, "the first token waits for nobody"
    assert len(sent.messages) < 20
    gaps_ns = [after - before for before, after in zip(sent.times_ns, sent.times_ns[1:], strict=False)]
    assert min(gaps_ns[:-1]) >= MIN_INTERVAL_S * 1e9 > max(gaps_ns) - 2 * STEP_NS


def test_long_steps_are_told_one_by_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.plan.step_ns = (SHORT_STEP_NS, SHORT_STEP_NS + 1)
    sent, execute = Sent(world, monkeypatch), begin(world)
    add(execute, world, num_tokens=20)
    while execute._engine.has_work:
        execute.wait()
        execute.turn()
    assert [len(message) for message in sent.messages] == [1] * 20


def test_nothing_is_held_while_a_prompt_is_computed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with a prompt may take a second, whatever the last ones took."""
    sent, execute = Sent(world, monkeypatch), begin(world)
    collect, num_prompts = execute._engine.collect, 0

    def collect_with_a_look() -> StepOutputs:
        nonlocal num_prompts
        if any(launched.plan.num_prefill_tokens for launched in execute._engine._in_flight):
            num_prompts += 1
            assert not execute._reports._held
        return collect()

    monkeypatch.setattr(execute._engine, "collect", collect_with_a_look)
    add(execute, world, num_tokens=100)
    for num_turns in range(31):
        execute.turn()
        if num_turns % 5 == 3:
            add(execute, world, num_tokens=2)
    assert num_prompts >= 6
    assert len(sent.messages) < 31
