"""The levels of Arm processors, cross-compiled and run under emulation where that is installed.

On Debian: ``apt install g++-aarch64-linux-gnu qemu-user``.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.workers.execute.kernels.partial import QUICKLY
from triptych.workers.execute.kernels.compile import SOURCES, compile_options

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = [*QUICKLY, "-static", f"-I{SOURCES}", str(Path(__file__).with_name("products.cpp"))]
# What a level has in common with the ones above is compiled for the first of them.
LEVELS = {
    "neon": [],
    "neon_dot": ["-DWITHOUT_FLOAT32", "-DWITHOUT_BFLOAT16"],
    "neon_bf16": ["-DWITHOUT_FLOAT32", "-DWITHOUT_BYTES"],
}
EXACT_SUMS = "354f3e75\n"  # of int8, as on x86


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_products_are_right_and_the_same_in_any_batch(level: str, tmp_path: Path) -> None:
    compiler, emulator = shutil.which(COMPILER), shutil.which(EMULATOR)
    if compiler is None or emulator is None:
        pytest.skip(f"needs {COMPILER} and {EMULATOR}")
    program = tmp_path / "products"
    subprocess.run([compiler, *compile_options(level), *FLAGS, *LEVELS[level], "-o", program], check=True)
    done = subprocess.run([emulator, "-cpu", "max", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if "-DWITHOUT_BYTES" in LEVELS[level] else EXACT_SUMS)
