"""A benchmark's report does not depend on tools that a machine may lack."""

from __future__ import annotations

import pytest

from benchmarks.report import environment


def test_without_git_there_is_no_commit_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert environment("numpy")["commit"] is None
