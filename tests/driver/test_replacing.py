"""What the driver waits for before it replaces a worker."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.driver.replacing import wait_until_unused
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
