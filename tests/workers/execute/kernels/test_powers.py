"""Functions of single values, as every level of the kernels computes them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from triptych.workers.execute.kernels.compile import SOURCES, available_levels, compile_options


@pytest.mark.parametrize("level", [level for level in available_levels() if level in ("avx512", "avx2", "neon")])
def test_powers_are_within_their_error_and_nan_is_not_lost(level: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program, source = tmp_path / "powers", Path(__file__).with_name("powers.cpp")
    subprocess.run([compiler, *compile_options(level), f"-I{SOURCES}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert max(map(float, done.stdout.split())) < 3e-7
    assert done.returncode == 0
