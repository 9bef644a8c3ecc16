"""How workers are started, and why not."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from triptych.driver.processes import log_of, start_process, why_not_started

POPEN = subprocess.Popen


def test_worker_has_a_temporary_folder_where_only_its_run_directory_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose file system is read-only. torch needs one to be imported."""

    def show_folder(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return POPEN([sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"], **options)

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    monkeypatch.setattr(subprocess, "Popen", show_folder)
    assert start_process(tmp_path, "execute", arguments=[], stdin=0, cwd=None).wait(60) == 0
    assert log_of(tmp_path, "execute").read_text().strip() == str(tmp_path)


def test_deleted_run_directory_is_named_as_the_reason(tmp_path: Path) -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert why_not_started(OSError(errno.EROFS, "Read-only file system", "/a/log"), tmp_path).startswith("/a/log: Read")
    assert why_not_started(error, tmp_path) == "No such file or directory"
    assert why_not_started(error, tmp_path / "gone").startswith(f"the run directory {tmp_path / 'gone'} was deleted")
