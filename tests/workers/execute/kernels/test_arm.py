"""The levels of Arm processors, cross-compiled and run under emulation where that is installed.

On Debian: ``apt install g++-aarch64-linux-gnu qemu-user``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.workers.execute.kernels.partial import QUICKLY
from triptych.workers.execute.kernels.compile import SOURCES, compile_options
from triptych.workers.execute.user_cache import cache_folder, keep_newest, making, note_use

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PROGRAM = Path(__file__).with_name("products.cpp")
FLAGS = [*QUICKLY, "-static", f"-I{SOURCES}", str(PROGRAM)]
# What a level has in common with the ones above is compiled for the first of them.
LEVELS = {
    "neon": [],
    "neon_dot": ["-DWITHOUT_FLOAT32", "-DWITHOUT_BFLOAT16"],
    "neon_bf16": ["-DWITHOUT_FLOAT32", "-DWITHOUT_BYTES"],
}
EXACT_SUMS = "354f3e75\n"  # of int8, as on x86


def build(compiler: str, level: str) -> Path:
    """The program, from the cache or newly compiled."""
    command = [compiler, *compile_options(level), *FLAGS, *LEVELS[level]]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\0".join([*command, version]).encode())
    for source in (*sorted(SOURCES.iterdir()), PROGRAM):
        digest.update(source.read_bytes())
    program = cache_folder() / "arm" / f"{level}-{digest.hexdigest()[:16]}"
    if program.exists():
        note_use(program)
        return program
    with making(program) as scratch:
        if scratch is not None:
            subprocess.run([*command, "-o", scratch / level], check=True)
            os.replace(scratch / level, program)
            keep_newest(program.parent, "neon*-????????????????", 3 * len(LEVELS))
    return program


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_products_are_right_and_the_same_in_any_batch(level: str) -> None:
    compiler, emulator = shutil.which(COMPILER), shutil.which(EMULATOR)
    if compiler is None or emulator is None:
        pytest.skip(f"needs {COMPILER} and {EMULATOR}")
    done = subprocess.run([emulator, "-cpu", "max", build(compiler, level)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if "-DWITHOUT_BYTES" in LEVELS[level] else EXACT_SUMS)
