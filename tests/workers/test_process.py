"""What every worker process does around its own work."""

from __future__ import annotations

import gc
from pathlib import Path

from tests.protocol.factories import make_journal
from triptych.protocol.board import Board
from triptych.protocol.config import PipelineConfig
from triptych.workers.process import WorkerContext


def test_what_is_there_when_a_worker_is_ready_is_not_looked_at_by_the_garbage_collector(tmp_path: Path) -> None:
    journal, board = make_journal(tmp_path), Board(tmp_path / "board")
    context = WorkerContext("execute", 1, tmp_path, PipelineConfig(), board, journal)
    loaded = [[index] for index in range(1000)]
    context.set_phase("loading")
    before = gc.get_freeze_count()
    context.set_phase("ready")
    assert gc.get_freeze_count() >= before + len(loaded)
