"""What every benchmark reports about its environment, and how."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def environment(*packages: str) -> dict[str, object]:
    """Hardware, load, commit, and the versions of Python and of those ``packages`` that are installed."""
    versions = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "hardware": f"{cpu_name()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[0],
        "commit": commit(),
        "versions": versions,
    }


def publish(report: dict[str, Any], output: Path | None = None) -> None:
    """Print it as one JSON line, and write that to a file if there is to be one."""
    line = json.dumps(report)
    print(line)
    if output is not None:
        output.write_text(line + "\n")


def commit() -> str | None:
    """None without git or a repository."""
    with contextlib.suppress(OSError):
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        return found.stdout.strip() or None
    return None


def cpu_name() -> str:
    """With the family, as virtual machines may call two generations the same."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts = {key.strip(): value for key, _, value in (line.partition(": ") for line in reversed(lines))}
    if "model name" not in facts:
        return platform.machine()
    return f"{facts['model name']} (family {facts['cpu family']})" if "cpu family" in facts else facts["model name"]


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median and interquartile range, which is 0 for a single sample."""
    # Before Python 3.13 one sample has no quantiles.
    low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return {"median": round(median, 4), "iqr": round(high - low, 4), "repeats": len(samples)}


def time_us(run: Callable[[], object], *, warm_up: int, repeats: int, calls: int = 1) -> list[float]:
    """Microseconds per call of ``run``, one value for each repeat of so many calls."""
    samples = []
    for _ in range(warm_up + repeats):
        start = time.perf_counter_ns()
        for _ in range(calls):
            run()
        samples.append((time.perf_counter_ns() - start) / 1000 / calls)
    return samples[warm_up:]


def best_of(function: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest call: the machine's speed without other load."""
    return min(time_us(function, warm_up=0, repeats=repeats)) / 1e6
