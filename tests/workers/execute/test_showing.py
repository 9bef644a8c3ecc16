"""What execute shows of itself, and that it computes nothing unless somebody looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.execute.factories import make_engine, make_sequence
from triptych.protocol.board import Board
from triptych.workers.execute import showing
from triptych.workers.execute.showing import Showing


def test_last_steps_and_pages_are_shown_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(showing, "NUM_STEPS", 3)
    board, engine = Board(tmp_path / "board"), make_engine(make_sequence(7, num_tokens=12, max_tokens=4))
    view = board.view
    shown = Showing(view, engine)
    for _ in range(4):
        engine.step()
    shown.show_if_due()
    assert view.look() == {}  # nobody had looked
    monkeypatch.setattr(showing, "INTERVAL_S", 0)
    Showing(view, engine).show_if_due()
    found = view.look()
    steps = found["steps"]
    assert (steps["last"], steps["prefill_tokens"], steps["decodes"]) == (4, [4, 0, 0], [0, 1, 1])
    assert len(steps["ms"]) == len(steps["preempted"]) == 3
    assert found["pages"]["held"] == [[7, 4]]
    board.close()
