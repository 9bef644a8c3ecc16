"""A few seconds of ``make chaos``: every process is killed, and no client notices more than a pause."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos"


@pytest.mark.slow
def test_a_few_seconds_of_chaos_lose_nothing() -> None:
    command = [sys.executable, str(CHAOS), "--seconds", "4", "--gap", "0.3", "--streams", "64", "--poison", "0.002"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.stdout, result.stderr
    report = json.loads(result.stdout)
    assert report["failures"] == {}, (report["failures"], report["examples"])
    assert report["requests"]["whole"] > 0
    assert report["requests"]["embedded"] > 0
    assert report["kills"]["all"] > 0
    assert result.returncode == 0
