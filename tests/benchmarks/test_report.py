"""What benchmarks report of their environment and of their samples."""

from __future__ import annotations

import pytest

from benchmarks.report import environment, spread


def test_without_git_there_is_no_commit_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert environment("numpy")["commit"] is None


def test_a_single_sample_has_no_spread() -> None:
    assert spread([2.5]) == {"median": 2.5, "iqr": 0.0, "repeats": 1}
