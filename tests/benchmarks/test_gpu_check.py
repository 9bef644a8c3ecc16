"""The GPU check, tried on a machine without a GPU."""

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

from benchmarks.gpu.table import ROWS, table

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
def test_parts_complete_in_a_dry_run(tmp_path: Path) -> None:
    """The shortest part as a process, and one here that runs a model; ``gpu_check.py --dry-run`` runs all of them."""
    out = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--budget-s", "840", "--out", str(out), "--parts", "limits"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["limits"].get("error", "") + report["limits"].get("log", "") == ""
    gpu_check.run_part("small", str(tmp_path), is_dry=True)
    assert json.loads((tmp_path / "small.json").read_text())["overlapped_equals_serial"]
    assert report["dropped"] == []
    last = done.stdout.splitlines()[-len(ROWS) :]
    assert [line[:44].rstrip() for line in last] == [row.what for row in ROWS]


SCRIPT_OF_FAKES = """
import importlib, os, signal, sys, types
sys.path.insert(0, {root!r})
# The parts here compute nothing, and the import of torch would be nearly all of their work.
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["benchmarks.cpu_models"] = models = types.ModuleType("cpu_models")
models.SHAPES, models.make_checkpoint = {{"qwen3-0.6b": {{}}, "qwen3-moe-0.5b": {{}}}}, None
import benchmarks.gpu_check as gpu_check
def raises(setting, note):
    note("kept", 1)
    raise RuntimeError("no luck")
def hangs(setting, note):
    note("kept", 1)
    signal.pause()
def killed(setting, note):
    note("kept", 1)
    os.kill(os.getpid(), signal.SIGKILL)
def ended(setting, note):
    note("kept", 1)
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
def fine(setting, note):
    note("copy_bytes_per_s", 2.0)
    note("path", sys.path[1:])
module = types.SimpleNamespace(small=raises, processes=hangs, fp8=killed, limits=fine, large=ended)
importlib.import_module = lambda name: module
gpu_check.run_part(sys.argv[2], sys.argv[3], is_dry=True)
"""
ERRORS = {
    "small": "exit code 1: RuntimeError: no luck",
    "processes": "not done after 12 s",
    "fp8": "killed by SIGKILL",
    "large": "stopped",  # as its parent was, by the time limit of whoever called it
}


@pytest.mark.slow
def test_failed_hung_killed_or_stopped_part_is_named_and_the_others_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "fake.py", tmp_path / "there" / "report.json"
    script.write_text(SCRIPT_OF_FAKES.format(root=str(ROOT)))
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    monkeypatch.setenv("PYTHONPATH", "/carried/packages")  # of a machine where nothing can be installed
    report = {"what": "gpu_check", "is_dry": True, "device": "dry run", "date": "2026-01-01", "seconds": {}}
    # In a dry run, a part has four times as long.
    names = ("small", "processes", "fp8", "limits", "large", "deterministic")
    parts = [gpu_check.Part(name, "fake", 3.0 if name == "processes" else 60.0) for name in names]
    gpu_check.check(parts, report, out, gpu_check.time.monotonic() + 600)
    found, lines = json.loads(out.read_text()), capsys.readouterr().out.splitlines()
    assert {name: (found[name]["error"], found[name]["kept"]) for name in ERRORS} == {
        name: (error, 1) for name, error in ERRORS.items()
    }
    assert "deterministic" not in found
    assert found["limits"]["copy_bytes_per_s"] == 2.0
    assert {str(ROOT), "/carried/packages"} <= set(found["limits"]["path"])
    assert sorted(lines[-len(ERRORS) :]) == sorted(f"{name}: {error}" for name, error in ERRORS.items())
    assert any(line.startswith("copy bandwidth") and line.split()[-1] == "2" for line in lines)


def test_part_without_time_left_is_not_started_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = {"what": "gpu_check", "is_dry": True, "device": "dry run", "date": "2026-01-01", "seconds": {}}
    gpu_check.check(gpu_check.SETS["large"], report, tmp_path / "report.json", gpu_check.time.monotonic())
    names = [part.name for part in gpu_check.SETS["large"]]
    assert json.loads((tmp_path / "report.json").read_text())["dropped"] == names
    last = capsys.readouterr().out.splitlines()[-len(names) :]
    assert sorted(last) == sorted(f"{name}: no time was left" for name in names)


def test_part_may_use_the_time_that_earlier_parts_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def wait(_process: None, limit_s: float) -> str:
        limits.append(limit_s)
        return ""

    monkeypatch.setattr(gpu_check.subprocess, "Popen", lambda *_arguments, **_options: None)
    monkeypatch.setattr(gpu_check, "wait", wait)
    for left_s, later_s in ((300, 240), (300, 100), (40, 240)):
        gpu_check.attempt(gpu_check.Part("small", "models", 60.0), tmp_path, left_s, later_s, is_dry=False)
    assert limits == [60, 200, 40]


def test_every_set_fits_into_a_call_and_begins_with_the_limits() -> None:
    for parts in gpu_check.SETS.values():
        assert parts[0].name == "limits"
        assert sum(part.budget_s for part in parts) <= gpu_check.BUDGET_S < 480
    both = {part.name for parts in gpu_check.SETS.values() for part in parts}
    assert both >= {row.path.split(".")[0] for row in ROWS} - {"ratios"}


@pytest.mark.parametrize(
    ("names", "run"),
    [(["large"], ["limits", "large"]), (["numerics", "peers_large"], ["numerics", "peers_large"]), ([], [])],
    ids=["compared", "not compared", "none"],
)
def test_limits_run_together_with_what_they_are_compared_with(names: list[str], run: list[str]) -> None:
    assert [part.name for part in gpu_check.choose("small", names)] == run


def run_none(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(gpu_check, "device_name", lambda: None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--parts", *(str(argument) for argument in arguments)])
    gpu_check.main()


def test_reports_of_two_calls_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part skipped for lack of time does not replace an earlier result; reports of another device are ignored."""
    shared = {"is_dry": False, "device": "NVIDIA H200", "hardware": "its host"}
    small = {"small": {"peer_workload": {"output_tokens_per_s": 60.0}}, "fp8": {"batch_1": {"tokens_per_s": 9.0}}}
    second = {"peers_small": {"sdpa continuous_batching": 20.0}, "fp8": {"error": "no time was left"}}
    other = {"large": {"batch_1": {"of_bandwidth": 1.0}}}
    reports = [shared | small, shared | second, {**shared, "device": "NVIDIA A100"} | other]
    files = [tmp_path / f"{index}.json" for index in range(3)]
    for file, report in zip(files, reports, strict=True):
        file.write_text(json.dumps(report))
    run_none(monkeypatch, "--out", files[0], "--add", *files[1:])
    found = json.loads(files[0].read_text())
    assert (found["ratios"], found["dropped"]) == ({"small": 3.0}, [])
    assert found["fp8"] == small["fp8"]
    assert "large" not in found
    assert found["hardware"] == "its host"
    assert "A100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("last_output", "error"),
    [
        ("", "exit code 1"),
        ("warning\nRuntimeError: no luck\n\n", "exit code 1: RuntimeError: no luck"),
        ("needs pyzmq: not installed here\n", "needs pyzmq: not installed here"),
    ],
)
def test_error_contains_the_last_output_of_the_part(last_output: str, error: str) -> None:
    assert gpu_check.explained("exit code 1", last_output) == error


def test_table_says_what_was_met_missed_and_not_measured() -> None:
    report = {
        "seconds": {"small": 1.0, "large": 2.0, "processes": 3.0},
        "small": {"batch_32": {"idle_share": 0.01}, "throughput": {"output_tokens_per_s": 10.0}},
        "large": {"error": "exit code 1"},
        "processes": {"error": "needs pyzmq: not installed here"},
    }
    lines = {line[:44].strip(): line[44:].split() for line in table(report).splitlines()[1:]}
    assert lines["0.6B, batch 32: idle share of the GPU"] == ["0.01", "<", "0.02", "met"]
    assert lines["0.6B, 256 requests, output tokens/s"] == ["10", ">=", "20000", "MISSED"]
    assert lines["8B, 256 x 1024/1024, output tokens/s"] == ["exit", "code", "1", ">=", "8500"]
    assert lines["three processes: added inter-token, ms"] == ["needs", "pyzmq", "<=", "0.3"]
    assert lines["8B fp8, batch 1, tokens/s"] == ["not", "run"]


@pytest.mark.skipif(HAS_GPU, reason="there is one")
def test_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    gpu_check.main()
    assert "dry-run" in json.loads(capsys.readouterr().out)["skipped"]
