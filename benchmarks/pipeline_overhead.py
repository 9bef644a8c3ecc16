"""What do three processes cost compared with one? Prints one JSON line.

The same requests on the same runner: once by calling the engine's step loop in this process, once through the whole
pipeline and a ZeroMQ client; in turns, so that both see the same machine. If steps overlap, they do in both. Times
between tokens are taken where tokens are used: after ``step`` returns, and in the client's listener; their mean counts,
because the client receives several very short steps at once.

A third turn is the engine again, beside an unrelated process that keeps one core busy: what a loop loses because
another process computes. Also the processor time of each process, which other load affects less than wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.records import random_prompts
from benchmarks.report import environment, publish
from benchmarks.sequences import make_engine, make_sequence
from triptych import Driver
from triptych.driver.session import Session
from triptych.driver.stream import Completion, Delta
from triptych.driver.submitting import request_map
from triptych.protocol.config import PipelineConfig
from triptych.protocol.connection import Address, Connection
from triptych.protocol.messages import Accepted
from triptych.protocol.run_dir import follow_endpoint, submit_endpoint
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.build import build_runner

PROMPT_TOKENS, TURNS = 64, 5
BUSY = "while True: pass"


class Work(NamedTuple):
    batch: int
    output_tokens: int  # of each


class Run(NamedTuple):
    itl_mean_ms: float
    tokens_per_s: float
    processor_us: dict[str, float]  # of each process, per token


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--turns", type=int, default=TURNS)
    arguments.add_argument("--model", default="demo", help="a checkpoint, or the demo model")
    arguments.add_argument("--dtype", default="auto")
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    arguments.add_argument("--output-tokens", type=int, default=800)
    options = arguments.parse_args()
    config = PipelineConfig.from_options(model=options.model, dtype=options.dtype)
    with tempfile.TemporaryDirectory() as folder, Driver(config=config) as driver:
        engine = load(config, Path(folder))
        work = [Work(batch, options.output_tokens) for batch in options.batches]
        results = {f"batch {each.batch}": compare(engine, driver, each, options.turns) for each in work}
    about = environment("torch", "transformers", "pyzmq") | {"model": Path(options.model).name, "dtype": options.dtype}
    publish({"what": "pipeline_overhead", **about, "turns": options.turns, "results": results})


def load(config: PipelineConfig, folder: Path) -> Engine:
    runner, card = build_runner(
        config.model, config.cache, config.scheduler, model_dir=config.model.model, run_dir=folder,
    )  # fmt: skip
    runner.warm_up()
    return make_engine(runner, card, config.scheduler, depth=int(runner.overlaps))


def compare(engine: Engine, driver: Driver, work: Work, turns: int) -> dict[str, Any]:
    alone: list[Run] = []
    beside: list[Run] = []
    piped: list[Run] = []
    run_engine(engine, work, 0)
    run_pipeline(driver, work, 0)
    for turn in range(1, turns + 1):
        alone.append(run_engine(engine, work, 2 * turn))
        piped.append(run_pipeline(driver, work, turn))
        with busy_core():
            beside.append(run_engine(engine, work, 2 * turn + 1))
    return {
        "one_process": medians(alone),
        "one_process_beside_a_busy_core": medians(beside),
        "three_processes": medians(piped),
        "added_itl_ms": statistics.median(b.itl_mean_ms - a.itl_mean_ms for a, b in zip(alone, piped, strict=True)),
        "throughput_ratio": ratio(piped, alone),
        "throughput_ratio_of_a_busy_core": ratio(beside, alone),
    }


def medians(runs: list[Run]) -> dict[str, Any]:
    return {
        "itl_mean_ms": round(statistics.median(run.itl_mean_ms for run in runs), 3),
        "tokens_per_s": round(statistics.median(run.tokens_per_s for run in runs), 1),
        "processor_us_a_token": {
            role: round(statistics.median(run.processor_us[role] for run in runs), 1) for role in runs[0].processor_us
        },
    }


def ratio(runs: list[Run], others: list[Run]) -> float:
    pairs = zip(runs, others, strict=True)
    return round(statistics.median(run.tokens_per_s / other.tokens_per_s for run, other in pairs), 3)


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def processor_s(pid: int) -> float:
    """Processor time of a process's threads."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def run_engine(engine: Engine, work: Work, turn: int) -> Run:
    times: dict[int, list[float]] = {i: [] for i in range(work.batch)}
    used_s, began = time.process_time(), time.perf_counter()
    for index, prompt in enumerate(random_prompts(work.batch, PROMPT_TOKENS, turn)):
        engine.add(make_sequence(index, prompt, work.output_tokens, generation=turn))
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        if outputs is not None:
            for key in outputs.progress.keys:
                times[key[0]].append(now)
            for key in outputs.progress.finished:
                engine.release(key)
    return summarise(times, began, {"engine": time.process_time() - used_s})


class Stopwatch:
    """A listener that records when each token arrived."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.done = threading.Event()

    def on_accepted(self, accepted: Accepted) -> None:
        pass

    def on_delta(self, delta: Delta) -> None:
        self.times += [time.perf_counter()] * len(delta.token_ids)

    def on_end(self, completion: Completion, error: Any) -> None:
        self.done.set()


def run_pipeline(driver: Driver, work: Work, turn: int) -> Run:
    service = driver.config.service
    endpoints = submit_endpoint(driver.run_dir, service), follow_endpoint(driver.run_dir, service)
    session = Session(Connection(Address(*endpoints))).start()
    watches = [Stopwatch() for _ in range(work.batch)]
    options = {"max_tokens": work.output_tokens, "ignore_eos": True}
    pids = {role: pid for role, pid in driver.pids.items() if pid is not None}
    used_s = {role: processor_s(pid) for role, pid in pids.items()} | {"client": time.process_time()}
    began = time.perf_counter()
    for index, (watch, prompt) in enumerate(zip(watches, random_prompts(work.batch, PROMPT_TOKENS, turn), strict=True)):
        session.submit(f"b{work.batch}-{turn}-{index}", request_map(prompt, None, None, options), watch)
    for watch in watches:
        watch.done.wait()
    session.close()
    now_s = {role: processor_s(pid) for role, pid in pids.items()} | {"client": time.process_time()}
    return summarise(
        {i: watch.times for i, watch in enumerate(watches)}, began, {role: now_s[role] - used_s[role] for role in now_s}
    )


def summarise(times: dict[int, list[float]], began: float, used_s: dict[str, float]) -> Run:
    assert len({len(t) for t in times.values()}) == 1, "a request has too few tokens"
    gaps = np.concatenate([np.diff(t) for t in times.values()])
    elapsed = max(t[-1] for t in times.values()) - began
    num_tokens = sum(map(len, times.values()))
    used_us = {role: used * 1e6 / num_tokens for role, used in used_s.items()}
    return Run(float(np.mean(gaps)) * 1e3, num_tokens / elapsed, used_us)


if __name__ == "__main__":
    main()
