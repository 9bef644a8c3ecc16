"""What every worker process does around its own work."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest

from tests.cards import CARD
from tests.protocol.factories import make_journal
from tests.simulation.clock import installed
from tests.simulation.processes import Worker
from tests.simulation.world import World
from triptych.protocol.board import ROLES, Board
from triptych.protocol.config import PipelineConfig
from triptych.workers.process import TICK_S, WorkerContext, wait_for_model


def make_context(folder: Path) -> WorkerContext:
    return WorkerContext("execute", 1, folder, PipelineConfig(), Board(folder / "board"), make_journal(folder))


def test_tokenizer_is_read_once_while_the_weights_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a large one takes a second of processor time, which execute needs for itself."""
    reads: list[str | None] = []
    turns = iter([None, None, None, CARD])

    def pass_time(_: float) -> None:
        if (card := next(turns)) is not None:
            card.publish(tmp_path)

    def load(_: Path) -> str | None:
        reads.append("tokenizer" if reads else None)
        return reads[-1]

    monkeypatch.setattr(time, "sleep", pass_time)
    assert wait_for_model(make_context(tmp_path), load) == (CARD, "tokenizer")
    assert reads == [None, "tokenizer"]


def test_objects_that_exist_when_a_worker_is_ready_are_excluded_from_collections(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    loaded = [[index] for index in range(1000)]
    context.set_phase("loading")
    before = gc.get_freeze_count()
    context.set_phase("ready")
    assert gc.get_freeze_count() >= before + len(loaded)


@pytest.mark.parametrize("role", ROLES)
def test_journal_is_read_every_tick_whatever_else_arrives(role: str) -> None:
    """By each worker: what a lost message would have told is there."""
    world = World(0)
    with installed(world.clock):
        worker = Worker(world, role)
        body = worker._build()
        body.turn()
        world.clock.advance_to(world.clock.now_ns + int(0.9e9 * TICK_S))
        body.turn()
        body.wait()
        assert worker.next_ns - world.clock.now_ns <= 0.11e9 * TICK_S
