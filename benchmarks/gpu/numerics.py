"""The tests that a GPU changes: kernels compiled and not interpreted, CUDA graphs, the fused decoder on the device."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.setting import Notes, Setting

ROOT = Path(__file__).resolve().parents[2]
TESTS = [
    "tests/workers/execute/model/test_graphs.py",
    "tests/workers/execute/model/test_fused_decoder.py",
    "tests/workers/execute/attention/test_triton_attention.py",
    "tests/workers/execute/sampling/test_device.py",
]
DRY_TESTS = ["tests/workers/execute/attention/test_triton_attention.py", "-k", "touches or padded"]


def numerics(setting: Setting, note: Notes) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    if not setting.is_dry and importlib.util.find_spec("xdist"):
        command += ["-n", "6"]
    command += DRY_TESTS if setting.is_dry else TESTS
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)}
    note("counts", counts)
    note("failures", re.findall(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE))
    note("is_green", done.returncode == 0)
    if done.returncode:
        note("output", done.stdout[-6000:] + done.stderr[-1000:])
