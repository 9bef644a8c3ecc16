"""What lies where in a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.protocol.config import ServiceConfig
from triptych.protocol.run_dir import follow_endpoint, journal_path, submit_endpoint


def test_sockets_and_journal_are_in_the_folder() -> None:
    folder, service = Path("/run/t"), ServiceConfig()
    assert submit_endpoint(folder, service) == "ipc:///run/t/submit"
    assert follow_endpoint(folder, service) == "ipc:///run/t/follow"
    assert journal_path(folder, service) == Path("/run/t/journal")


def test_sockets_and_journal_are_at_the_configured_paths() -> None:
    service = ServiceConfig(submit="ipc:///a/s", follow="ipc:///a/f", journal="/disk/journal")
    folder = Path("/run/t")
    assert submit_endpoint(folder, service) == "ipc:///a/s"
    assert follow_endpoint(folder, service) == "ipc:///a/f"
    assert journal_path(folder, service) == Path("/disk/journal")


def test_path_of_the_journal_holds_wherever_the_program_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files are made beside it later."""
    monkeypatch.chdir(tmp_path)
    assert journal_path(Path("/run/t"), ServiceConfig(journal="here")) == tmp_path / "here"
