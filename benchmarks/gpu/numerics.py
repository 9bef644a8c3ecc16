"""Tests that a GPU changes: kernels compiled instead of interpreted, CUDA graphs, the fused decoder on the device."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import Notes, Setting, require

ROOT = Path(__file__).resolve().parents[2]
TESTS = [
    "tests/workers/execute/model/device/test_graphs.py",
    "tests/workers/execute/model/fused/test_decoder.py",
    "tests/workers/execute/model/device/test_lora.py",
    "tests/workers/execute/kernels/test_triton_experts.py",
    "tests/workers/execute/kernels/test_triton_lora.py",
    "tests/workers/execute/kernels/test_triton_one_row.py",
    "tests/workers/execute/kernels/test_triton_select.py",
    "tests/workers/execute/attention/test_triton_attention.py",
    "tests/workers/execute/attention/test_hopper_attention.py",
    "tests/workers/execute/attention/test_eight_bit_attention.py",
    "tests/workers/execute/sampling/test_device.py",
    "tests/workers/execute/model/test_page_moves.py",
]
DRY_TESTS = ["tests/workers/execute/attention/test_triton_attention.py", "-k", "touches or padded"]
LIMIT_S = 120.0  # below the part's budget, so that failures until then are still reported
OUTCOME = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) .*|.*::.* (PASSED|FAILED|ERROR|SKIPPED)\b.*)"
)


def numerics(setting: Setting, note: Notes) -> None:
    require("pytest")
    options: list[str] = []
    if not setting.is_dry:
        options = ["-p", "benchmarks.gpu.on_device"] + ["-n", "12"] * bool(importlib.util.find_spec("xdist"))
    run_tests(
        [*options, *(DRY_TESTS if setting.is_dry else TESTS)], note, limit_s=4 * LIMIT_S if setting.is_dry else LIMIT_S
    )


def run_tests(arguments: Items[str], note: Notes, *, limit_s: float) -> None:
    """Run pytest. Its output goes to the part's log, and test outcomes are counted as they arrive."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-p", "benchmarks.gpu.our_tests", *arguments]
    # Many processes at once: if each used all processors, they would mostly wait. In long lines, pytest's
    # summary has room for the errors.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "400"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    counts = listen(process.stdout, note)
    code = process.wait()
    is_late = not timer.is_alive()
    timer.cancel()
    note("is_green", code == 0 and counts["passed"] > 0)
    if is_late:
        raise SystemExit(f"the tests were not done after {limit_s:.0f} s")
    if code:
        raise SystemExit(f"pytest ended with exit code {code}")


def listen(lines: Any, note: Notes) -> Counter[str]:
    """Count outcomes, and record them with the failures; every line is passed on."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for line in lines:
        print(line, end="", flush=True)
        if found := OUTCOME.match(line):
            counts[(found[1] or found[2]).lower()] += 1
            note("counts", counts)
        if re.match(r"(FAILED|ERROR) ", line):
            failures.append(line.strip()[:500])
            note("failures", failures)
    return counts
