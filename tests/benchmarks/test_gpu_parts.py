"""How the parts of the GPU check behave when something is missing or fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tests.conftest import HAS_GPU
from tests.workers.execute.conftest import quick_interpreter as quick_interpreter

pytest.importorskip("triton")

from benchmarks import gpu_check
from benchmarks.gpu import kernels, numerics, peers, runs, setting, speculation, step_times
from tests.workers.execute.factories import Told
from tests.workers.execute.model.device.next_token import NextToken, make_runner
from triptych.protocol.config import SchedulerConfig
from triptych.workers.execute.model.device.graphs import GraphCapture
from triptych.workers.execute.model.step_runner import trash_decodes

ROOT = Path(__file__).parents[2]


def test_backend_that_cannot_be_measured_is_named_and_the_others_are_compared() -> None:
    def fail() -> float:
        raise MemoryError("too much")

    notes: list[dict[str, Any]] = []
    ways = kernels._Variants(10.0, 100.0, notes.append)
    ways.measure("default", lambda: 0.5)
    ways.measure("broken", fail)
    ways.measure("better", lambda: 0.2)
    assert [summary["best"] for summary in notes] == ["default", "default", "better"]
    assert notes[-1]["shares"] == {"default": 0.2, "better": 0.5}
    assert notes[-1]["errors"] == {"broken": "MemoryError: too much"}


def test_without_measurements_there_is_no_best_backend() -> None:
    notes: list[dict[str, Any]] = []
    kernels._Variants(10.0, None, notes.append).measure("default", lambda: 1 / 0)
    assert notes[0]["best"] is None
    assert "ZeroDivisionError" in notes[0]["errors"]["default"]


def test_missing_package_is_named_as_pip_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name != "json" else name)
    with pytest.raises(SystemExit, match="needs pyzmq, no_such_package: not installed here"):
        setting.require("json", "zmq", "no_such_package")


def test_outcomes_of_tests_are_recorded_as_they_arrive(tmp_path: Path) -> None:
    """With and without pytest-xdist."""
    lines = [
        "tests/a.py::test_a[1-PASSED] PASSED   [ 10%]\n",
        "[gw3] [ 20%] FAILED tests/a.py::test_b \n",
        "tests/a.py::test_c SKIPPED (needs a CUDA or ROCm device) [ 30%]\n",
        "SKIPPED [1] tests/a.py:3: needs a CUDA or ROCm device\n",
        "FAILED tests/a.py::test_b - AssertionError\n",
    ]
    file = tmp_path / "numerics.json"
    numerics.listen(lines, setting.Notes(file))
    found = json.loads(file.read_text())
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["failures"] == ["FAILED tests/a.py::test_b - AssertionError"]


def write_test(folder: Path, body: str) -> str:
    file = folder / "test_one.py"
    file.write_text(f"def test_one():\n    {body}\n")
    return str(file)


@pytest.mark.parametrize(
    ("body", "limit_s", "why", "counts"),
    [
        ("assert False", 60, "exit code 1", {"failed": 1}),
        ("import signal; signal.pause()", 5, "not done after 5 s", None),
    ],
    ids=["fails", "hangs"],
)
def test_failed_tests_fail_the_part(
    body: str, limit_s: float, why: str, counts: dict[str, int] | None, tmp_path: Path
) -> None:
    file = tmp_path / "numerics.json"
    with pytest.raises(SystemExit, match=why):
        numerics.run_tests([write_test(tmp_path, body)], setting.Notes(file), limit_s=limit_s)
    found = json.loads(file.read_text())
    assert not found["is_green"]
    assert found.get("counts") == counts


def test_tests_find_the_caller_s_packages_and_use_one_processor_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen processes run at once, and torch is imported before any test can limit its threads."""
    monkeypatch.setenv("PYTHONPATH", "/carried/packages")
    monkeypatch.delenv("OMP_NUM_THREADS")
    body = "import os, sys; assert '/carried/packages' in sys.path; assert os.environ['OMP_NUM_THREADS'] == '1'"
    file = tmp_path / "numerics.json"
    numerics.run_tests([write_test(tmp_path, body)], setting.Notes(file), limit_s=120)
    assert json.loads(file.read_text())["counts"] == {"passed": 1}


def test_kernels_are_tested_without_packages_that_only_processes_need(tmp_path: Path) -> None:
    for name in ("zmq", "msgpack"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name}')")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    options = ["-q", "--co", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.our_tests"]
    command = [sys.executable, "-m", "pytest", *options, "tests/workers/execute/sampling/test_device.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_models_run_on_every_backend_without_packages_that_only_processes_need() -> None:
    ways = "; ".join(
        f"import triptych.workers.execute.model.{way}" for way in ("device.runner", "fused.proven", "modules.build")
    )
    parts = ", ".join(sorted({part.module for part in gpu_check.PARTS}))
    code = f"import sys; sys.modules.update(zmq=None, msgpack=None); from benchmarks.gpu import {parts}; {ways}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_tests_of_another_distribution_are_not_run_as_ours(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    code = "import benchmarks.gpu.our_tests, tests.conftest; print(tests.conftest.__file__)"
    paths = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; "
    done = subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == str(ROOT / "tests" / "conftest.py"), done.stderr


@pytest.mark.skipif(HAS_GPU, reason="there is one")
def test_device_tests_are_skipped_without_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-p", "benchmarks.gpu.on_device", *numerics.TESTS[-1:]]
    with pytest.raises(SystemExit, match="exit code 9"):
        numerics.run_tests(arguments, setting.Notes(tmp_path / "numerics.json"), limit_s=120)
    assert "nothing was proven: torch sees no CUDA device" in capsys.readouterr().out


class FakeRunner:
    """Its launch uploads, then runs a graph that was not captured yet, which runs the forward function."""

    is_batch_invariant = overlaps = hides_planning = False
    move = collect = is_fatal = prepare = show_progress = load_adapters = None
    proposer = check_costs = page_records = None

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self._graphs = Shelf(self)
        self._forward = self.compute

    def launch(self, _inputs: Any) -> None:
        self.log.append("upload")
        self._graphs.run(0)

    def compute(self, _key: int) -> None:
        self.log.append("compute")


class Shelf:
    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner

    def run(self, key: int) -> None:
        self.runner._forward(key)


def test_step_is_timed_from_its_first_computation_and_marked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    inner: Any = FakeRunner(log)
    inputs: Any = None  # it looks at none
    timed = runs.TimedRunner(inner, on_gpu=False)

    def mark() -> float:
        log.append("mark")
        return 1.0

    monkeypatch.setattr(timed, "_mark", mark)
    with timed.marking():
        timed.launch(inputs)
    assert log == ["upload", "mark", "compute", "mark"]
    inner.launch(inputs)
    assert log[4:] == ["upload", "compute"]


class Model:
    """Refers to itself, as a runner and its graphs do."""

    def __init__(self) -> None:
        self.itself = self


def test_dropped_model_is_freed_before_the_next_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU its pages are most of the memory, and no garbage collection runs by itself."""
    model = Model()
    is_there, seen = weakref.ref(model), []
    del model

    def build(*_: Any, **__: Any) -> None:
        seen.append(is_there() is not None)
        raise MemoryError

    monkeypatch.setattr(setting.Setting, "checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(runs, "build_runner", build)
    with pytest.raises(MemoryError):
        runs.load(setting.Setting(tmp_path, is_dry=True), "qwen3-0.6b")
    assert seen == [False]


def test_kernels_of_a_step_are_ranked_by_their_time() -> None:
    events = [
        types.SimpleNamespace(key=key, count=count, self_device_time_total=us)
        for key, count, us in (("short", 3, 30.0), ("on the host", 9, 0.0), ("long", 6, 3000.0))
    ]
    assert step_times.summed(events) == {"kernels_ms": 1.01, "kernels": {"long": [2.0, 1.0], "short": [1.0, 0.01]}}


def test_times_of_a_step_are_kept_where_nothing_can_be_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise AssertionError("no CUPTI here")

    monkeypatch.setattr(torch.profiler, "profile", refuse)
    runner = types.SimpleNamespace(launch=lambda _: None, collect=lambda: None)
    loaded: Any = types.SimpleNamespace(runner=runner)
    found = step_times.times(setting.Setting(Path(), is_dry=False), loaded, trash_decodes(1))
    assert found.keys() == {"launch_ms", "step_ms", "launch_share", "kernels_error"}


def test_timed_step_reads_and_writes_existing_pages() -> None:
    loaded: Any = types.SimpleNamespace(card=types.SimpleNamespace(page_size=16, num_pages=9))
    inputs = step_times.step_inputs(loaded, step_times.Step(2, 19, 1))
    assert inputs.block_tables.tolist() == [[1, 2], [3, 4]]
    assert inputs.slot_mapping.tolist() == [2 * 16 + 3, 4 * 16 + 3]
    assert (inputs.num_decodes, inputs.positions.tolist(), inputs.context_lens.tolist()) == (2, [19, 19], [20, 20])
    inputs = step_times.step_inputs(loaded, step_times.Step(3, 0, 50))
    assert inputs.block_tables.max() <= 9
    assert inputs.positions[50:100].tolist() == list(range(50))


def test_timed_step_of_decodes_beside_a_prompt() -> None:
    loaded: Any = types.SimpleNamespace(card=types.SimpleNamespace(page_size=16, num_pages=9))
    decodes, prompt = (step_times.step_inputs(loaded, step_times.Step(*step)) for step in ((2, 39, 1), (1, 0, 5)))
    inputs = step_times.joined(decodes, prompt)
    assert inputs.query_starts.tolist() == [0, 1, 2, 7]
    assert inputs.context_lens.tolist() == [40, 40, 5]
    assert inputs.positions.tolist() == [39, 39, 0, 1, 2, 3, 4]
    assert inputs.block_tables.tolist() == [[1, 2, 3], [4, 5, 6], [1, 0, 0]]
    assert (inputs.sample_rows.tolist(), len(inputs.sampled), inputs.num_decodes) == ([0, 1, 6], 3, 2)


def load_next_token(capture: GraphCapture) -> runs.Loaded:
    """A model without weights, with graphs, ready to check proposals."""
    config = SchedulerConfig(
        max_num_seqs=2, prefill_chunk=16, max_num_batched_tokens=20, num_speculative_tokens=speculation.NUM_PROPOSED
    )
    card = types.SimpleNamespace(page_size=16, num_pages=32, max_model_len=64, num_snapshots=None)
    sizes = {"decode_rows": 2, "prefill_tokens": 20, "max_proposals": speculation.NUM_PROPOSED}
    runner = make_runner(NextToken(), capture, **sizes)
    runner.capture_graphs()
    return runs.Loaded(runner, card, config, 0.0, 0.0)


def test_proposals_are_compared_with_a_run_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: dict[str, Any] = {}
    loaded = load_next_token(lambda run: run)
    monkeypatch.setattr(speculation, "load", lambda *_, **__: loaded)
    speculation.speculation(setting.Setting(tmp_path, is_dry=True), notes.__setitem__)  # type: ignore[arg-type]
    assert notes["equal_without"] is notes["replay_equals_launches"] is True
    for name in ("one", "several"):
        assert notes[name]["steps"] == [6, 3]
        assert notes[name]["graph_share"] == 1
        assert notes[name]["of_decode"] > 0


def test_guesses_of_a_draft_model_are_replaced_so_that_a_share_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: dict[str, Any] = {}
    loaded = load_next_token(lambda run: run)
    loaded.runner.proposer = Told(lambda sequence, count: [0] * count)
    monkeypatch.setattr(speculation, "load", lambda *_, **__: loaded)
    speculation.draft_speed(setting.Setting(tmp_path, is_dry=True), notes.__setitem__)  # type: ignore[arg-type]
    for name in ("streams_1", "streams_4", "streams_16"):
        steps = [notes[name][f"right_{share:.0%}_steps"] for share in speculation.RIGHT]
        assert (steps[0], steps[-1]) == (3, 6)
        assert steps == sorted(steps)


def test_replay_that_computes_something_else_is_found(tmp_path: Path) -> None:
    loaded = load_next_token(lambda run: lambda: None)
    assert speculation.replay_equals_launches(setting.Setting(tmp_path, is_dry=True), loaded) is False


def test_peer_is_not_timed_while_it_creates_its_cache() -> None:
    """From the start and end times of its requests."""

    def generate_batch(prompts: list[list[int]], **_: Any) -> dict[int, Any]:
        spans = [(10.0 + i, 12.0 + i) for i in range(len(prompts))]
        return {i: types.SimpleNamespace(generated_tokens=[1] * 4, lifespan=span) for i, span in enumerate(spans)}

    model = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"), generate_batch=generate_batch)
    config = GenerationConfig(max_new_tokens=4, min_new_tokens=4)
    assert peers._continuous(model, [[1], [2], [3]], config) == (12, 4.0)
    assert peers._attempt(peers._continuous, model, [[1], [2], [3]], config) == 3.0
