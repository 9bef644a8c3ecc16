"""The check of the GPU path finds its own mistakes on a machine without one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HAS_GPU
from tests.workers.execute.conftest import quick_interpreter as quick_interpreter

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


gpu_check = load_script()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_parts_run_to_their_end_in_a_dry_run(tmp_path: Path) -> None:
    """The shortest as a process, and here one that runs a model; ``gpu_check.py --dry-run`` runs all, in minutes."""
    out = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--minutes", "14", "--out", str(out), "--parts", "limits"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["limits"].get("error", "") + report["limits"].get("log", "") == ""
    gpu_check.run_part("small", str(tmp_path), is_dry=True)
    assert json.loads((tmp_path / "small.json").read_text())["overlapped_equals_serial"]
    last = done.stdout.splitlines()[-len(gpu_check.ROWS) :]
    assert [line[:44].rstrip() for line in last] == [row.what for row in gpu_check.ROWS]


def part(tmp_path: Path, code: str) -> Any:
    """A part of the check that runs this code, instead of one of its own."""
    script = tmp_path / "part.py"
    script.write_text(code)
    return subprocess.Popen([sys.executable, str(script)], start_new_session=True)


@pytest.mark.parametrize(
    ("code", "why"),
    [("pass", ""), ("raise SystemExit(3)", "exit code 3"), ("while True: pass", "not done after 1 s")],
    ids=["done", "failed", "hangs"],
)
def test_a_part_that_fails_or_hangs_is_ended_and_named(code: str, why: str, tmp_path: Path) -> None:
    process = part(tmp_path, code)
    assert gpu_check.wait(process, 1 if "while" in code else 60) == why
    assert process.poll() is not None


def test_a_part_without_time_is_not_begun(tmp_path: Path) -> None:
    found = gpu_check.attempt(gpu_check.PARTS[0], tmp_path, 3.0, is_dry=True)
    assert found == {"error": "no time was left"}


def test_the_table_says_what_was_met_missed_and_not_measured() -> None:
    report = {
        "seconds": {"small": 1.0, "large": 2.0},
        "small": {"batch_32": {"idle_share": 0.01}, "throughput": {"output_tokens_per_s": 10.0}},
        "large": {"error": "exit code 1"},
    }
    lines = {line[:44].strip(): line[44:].split() for line in gpu_check.table(report).splitlines()[1:]}
    assert lines["0.6B, batch 32: idle share of the GPU"] == ["0.01", "<", "0.02", "met"]
    assert lines["0.6B, 256 requests, output tokens/s"] == ["10", ">=", "20000", "MISSED"]
    assert lines["8B, 256 x 1024/1024, output tokens/s"] == ["exit", "code", "1", ">=", "8500"]
    assert lines["8B fp8, batch 1, tokens/s"] == ["not", "run"]


@pytest.mark.skipif(HAS_GPU, reason="there is one")
def test_a_machine_without_a_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    gpu_check.main()
    assert "dry-run" in json.loads(capsys.readouterr().out)["skipped"]
