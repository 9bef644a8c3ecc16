"""What the driver waits for before it replaces a worker, or does without an adapter."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.driver.replacing import replace_worker, wait_until_unused
from triptych.protocol.board import RUN, Board
from triptych.protocol.errors import ConfigError


def test_adapter_is_unused_once_prepare_has_completed_a_turn_after_it_was_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then, a request for it that prepare was just accepting is in the journal, where the driver looks."""
    board = Board(tmp_path / "board")
    board.set_mode(RUN)
    keeper = SimpleNamespace(unanswered_adapters=lambda: iter(()))
    running: Any = SimpleNamespace(board=board, keeper=keeper, check=lambda: None)
    board.worker("prepare").progress()
    with pytest.raises(ConfigError, match="prepare is down"):
        wait_until_unused(running, "a", deadline=0.0)
    monkeypatch.setattr(time, "sleep", lambda _: board.worker("prepare").progress())
    wait_until_unused(running, "a", deadline=time.monotonic() + 20)
    board.close()


@pytest.mark.parametrize("is_hung", [False, True])
def test_worker_is_replaced_after_its_next_progress_unless_it_is_found_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_hung: bool
) -> None:
    """A request that hangs every process would never be found if each was replaced before."""
    board, events = Board(tmp_path / "board"), list[str]()
    board.set_mode(RUN)

    def begin_next(role: str) -> None:
        board.worker(role).set_phase(board.next_epoch(role), "ready")

    def restart(role: str) -> None:
        events.append("restart")
        begin_next(role)

    def wait(_: float) -> None:
        events.append("wait")
        if len(events) == 3:
            begin_next("execute") if is_hung else board.worker("execute").progress()

    begin_next("execute")
    monkeypatch.setattr(time, "sleep", wait)
    supervisor = SimpleNamespace(error=None, restart=restart)
    running: Any = SimpleNamespace(board=board, supervisor=supervisor, check=lambda: None)
    replace_worker(running, "execute", timeout_s=20)
    assert events == ["wait"] * 3 + ["restart"] * (not is_hung)
    board.close()
