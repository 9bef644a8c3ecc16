"""Every sequence in flight is written to the intent, even while more are planned, launched or adopted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workers.execute.factories import make_engine, make_sequence, make_sequences
from triptych.protocol.board import Board
from triptych.protocol.intent import Intent
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.scheduling.plan import Plan
from triptych.workers.execute.scheduling.sequence import Key
from triptych.workers.execute.step_intent import StepIntent


@pytest.fixture
def intent(tmp_path: Path) -> Intent:
    return Board(tmp_path / "board").intent("execute")


def short_and_long() -> Engine:
    """At depth 1, those with one token are in a step but not in the next one."""
    sequences = [make_sequence(i, num_tokens=3, max_tokens=1 if i % 2 else 8) for i in range(6)]
    return make_engine(*sequences, depth=1, max_num_seqs=4, prefill_chunk=4)


def launch(engine: Engine, steps: StepIntent, in_flight: deque[set[int]]) -> None:
    while engine.may_plan and (plan := engine.plan()) is not None:
        steps.begin(plan, engine.scheduler.rows)
        engine.launch(plan)
        in_flight.append(numbers(plan))


def look_after_each_write(monkeypatch: pytest.MonkeyPatch, in_flight: deque[set[int]]) -> None:
    """The process may be killed there: no sequence in flight may be missing."""
    for name in ("set_others", "set_standing", "begin_one"):
        write = getattr(Intent, name)

        def write_and_look(self: Intent, keys: Any, write: Callable[..., None] = write) -> None:
            write(self, keys)
            assert set().union(*in_flight) <= set(self.read())

        monkeypatch.setattr(Intent, name, write_and_look)


def numbers(plan: Plan) -> set[int]:
    return {number(chunk.key) for chunk in plan.chunks}


def number(key: Key) -> int:
    return key[0] << 32 | key[1]


def test_sequences_in_flight_are_in_the_intent_until_they_are_collected(
    intent: Intent, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, steps, in_flight = short_and_long(), StepIntent(intent), deque[set[int]]()
    look_after_each_write(monkeypatch, in_flight)
    has_differed = False
    while engine.has_work:
        launch(engine, steps, in_flight)
        has_differed |= len(in_flight) == 2 and not in_flight[0] <= in_flight[1]
        assert set.union(*in_flight) <= set(intent.read())
        engine.collect()
        in_flight.popleft()
        steps.end()
        assert set().union(*in_flight) <= set(intent.read())
    assert has_differed
    assert intent.read() == []


def test_adopted_sequence_is_in_the_intent_beside_the_steps_in_flight(
    intent: Intent, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, steps, in_flight = short_and_long(), StepIntent(intent), deque[set[int]]()
    look_after_each_write(monkeypatch, in_flight)
    launch(engine, steps, in_flight)
    steps.begin_one((99, 1))
    assert set(intent.read()) == set.union(*in_flight, {number((99, 1))})
    steps.end_one()
    assert set(intent.read()) == set.union(*in_flight)


def test_sequence_adopted_while_nothing_runs_is_alone_in_the_intent(intent: Intent) -> None:
    steps = StepIntent(intent)
    steps.begin_one((99, 1))
    assert intent.read() == [number((99, 1))]
    steps.end_one()
    assert intent.read() == []


def test_no_sequence_is_missing_while_the_lists_are_rewritten(intent: Intent, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adoption uses the standing list; the next step finds the rows unchanged, and writes one list at a time."""
    engine, steps = make_engine(*make_sequences(3, max_tokens=8), depth=1), StepIntent(intent)
    in_flight = deque[set[int]]()
    for _ in range(5):  # until all are decoded
        launch(engine, steps, in_flight)
        engine.collect()
        in_flight.popleft()
        steps.end()
    assert in_flight
    look_after_each_write(monkeypatch, in_flight)
    steps.begin_one((99, 1))
    steps.end_one()
    launch(engine, steps, in_flight)
