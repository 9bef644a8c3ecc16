"""The threads of the compiled kernels under ThreadSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from triptych.workers.execute.kernels.compile import SOURCES

FLAGS = ["-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread"]


def test_joining_and_leaving_a_step_has_no_data_race(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "team_race"
    source = Path(__file__).with_name("team_race.cpp")
    built = subprocess.run(
        [compiler, *FLAGS, f"-I{SOURCES}", str(source), "-o", str(program)], capture_output=True, text=True
    )
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("this compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    # It needs addresses without randomisation, which a container may be unable to switch off.
    done = subprocess.run(["setarch", "-R", str(program)], capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr or "setarch" in done.stderr:
        pytest.skip(f"ThreadSanitizer does not run here: {done.stderr[:200]}")
    assert done.returncode == 0, done.stderr
