"""How long does a checkpoint in FP8 take to load on a CPU, and how much memory, compared with bfloat16?

Each case is a separate process that loads the model as execute does: as a first start, with the self-test, and as a
later one. Prints one JSON line with the seconds of both (medians), and in MB the peak of the process's own memory above
that before loading, without mapped files, and the memory afterwards, without pages.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_models import SHAPES, make_model
from benchmarks.report import environment

CASES = {  # whether the checkpoint is in FP8, and the requested quantization
    "bfloat16": (False, "none"),
    "fp8 to bfloat16": (True, "none"),
    "int8": (False, "int8"),
    "fp8 to int8": (True, "int8"),
    "int4": (False, "int4"),
    "fp8 to int4": (True, "int4"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    cases = {}
    for name in arguments.cases:
        is_fp8, quantization = CASES[name]
        folder = make_model(arguments.model, has_fp8=is_fp8)
        cases[name] = measure(folder, quantization, arguments.repeats)
    print(json.dumps({"what": "fp8_load", **environment("torch", "transformers"), **vars(arguments), "cases": cases}))


def measure(folder: Path, quantization: str, repeats: int) -> dict[str, float]:
    """Medians of that many starts of each kind."""
    starts = {kind: [start(folder, quantization, is_first=kind == "first") for _ in range(repeats)]
              for kind in ("first", "again")}  # fmt: skip
    return {
        f"{kind}_{what}": round(statistics.median(each[what] for each in of_kind), 2 if what == "s" else 0)
        for kind, of_kind in starts.items()
        for what in ("s", "peak_mb", "after_mb")
    }


def start(folder: Path, quantization: str, *, is_first: bool) -> dict[str, float]:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(load, (folder, quantization, is_first))


def load(folder: Path, quantization: str, is_first: bool) -> dict[str, float]:
    """Run in a separate process."""
    from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
    from triptych.workers.execute.model.build import build_runner
    from triptych.workers.execute.model.guard.proof import ProofStore

    config = ModelConfig(model=str(folder), device="cpu", quantization=quantization)
    if is_first:
        shutil.rmtree(ProofStore(folder, config).folders[0], ignore_errors=True)
        import transformers.models.auto.modeling_auto  # noqa: F401, the import takes as long for all
    before, watch = own_mb(), _Watch()
    with tempfile.TemporaryDirectory() as run_dir:
        began = time.perf_counter()
        runner, _ = build_runner(
            config, CacheConfig(num_pages=16), SchedulerConfig(),
            model_dir=folder, run_dir=Path(run_dir), progress=lambda done, total: None,
        )  # fmt: skip
        seconds = time.perf_counter() - began
    peak = watch.stop()
    after = own_mb()
    del runner
    return {"s": seconds, "peak_mb": peak - before, "after_mb": after - before}


class _Watch:
    """Samples the memory of this process a hundred times a second."""

    def __init__(self) -> None:
        self._greatest, self._is_over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(0.01):
            self._greatest = max(self._greatest, own_mb())

    def stop(self) -> float:
        self._is_over.set()
        self._thread.join()
        return self._greatest


def own_mb() -> float:
    """Memory of this process that is not mapped from files."""
    fields: dict[str, Any] = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1000


if __name__ == "__main__":
    main()
