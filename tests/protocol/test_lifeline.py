"""The environment of child processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from triptych.protocol.lifeline import child_environment


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python cannot be told before")
def test_child_imports_nothing_from_the_directory_it_is_started_in(tmp_path: Path) -> None:
    (tmp_path / "csv.py").write_text("raise SystemExit('imported')")
    command = [sys.executable, "-c", "import csv"]
    subprocess.run(command, cwd=tmp_path, env=child_environment(), check=True)
