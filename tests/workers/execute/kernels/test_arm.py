"""The levels of Arm processors, cross-compiled and run under emulation where that is installed.

On Debian: ``apt install g++-aarch64-linux-gnu qemu-user``.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from triptych.workers.execute.kernels.compile import SOURCES, compile_options

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-O1", "-static", f"-I{SOURCES}", str(Path(__file__).with_name("products.cpp"))]
LEVELS = ("neon_bf16", "neon_dot", "neon")
EXACT_SUMS = "354f3e75\n"  # of int8, as on x86


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_products_are_right_and_the_same_in_any_batch(level: str, tmp_path: Path) -> None:
    compiler, emulator = shutil.which(COMPILER), shutil.which(EMULATOR)
    if compiler is None or emulator is None:
        pytest.skip(f"needs {COMPILER} and {EMULATOR}")
    program = tmp_path / "products"
    subprocess.run([compiler, *compile_options(level), *FLAGS, "-o", program], check=True)
    done = subprocess.run([emulator, "-cpu", "max", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == EXACT_SUMS
