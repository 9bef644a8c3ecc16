"""execute fills in the view only while somebody looks at it."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from triptych.protocol import view as module
from triptych.protocol.board import Board


def test_reading_the_view_returns_its_content_and_requests_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = [Board(tmp_path / "board") for _ in range(2)]
    watcher, shower = (board.view for board in boards)
    assert [shower.is_watched, watcher.look(), shower.is_watched] == [False, {}, True]
    shower.show({"steps": [1]})
    assert watcher.look() == {"steps": [1]}
    monkeypatch.setattr(module, "WATCH_NS", 0)
    assert not shower.is_watched
    for board in boards:
        board.close()


def test_what_was_shown_before_a_viewer_came_is_not_seen(tmp_path: Path) -> None:
    with closing(Board(tmp_path / "board")) as shower, closing(Board(tmp_path / "board")) as watcher:
        shower.view.show({"steps": [1]})
        came_ns = time.monotonic_ns()
        assert watcher.view.look(came_ns) == {}
        shower.view.show({"steps": [2]})
        assert watcher.view.look(came_ns) == {"steps": [2]}
