"""The lines that a person types."""

from __future__ import annotations

import os

import pytest

from triptych.launch.terminal.chat_lines import history_path, line_editing


def test_user_without_a_home_directory_has_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    with line_editing(["/help"]):
        assert history_path() is None
