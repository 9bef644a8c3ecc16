"""What do three processes cost against one? Prints one JSON line.

The same requests on the same runner: once by calling the engine's step loop in this process, once through the whole
pipeline and a ZeroMQ client; in turns, so that both see the same machine. Where steps overlap, they do in both. Times
between tokens are taken where they are used: after ``step`` returns, and in the client's listener.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.records import random_prompts  # noqa: E402
from benchmarks.report import environment  # noqa: E402
from triptych import Driver  # noqa: E402
from triptych.driver.client import request_map  # noqa: E402
from triptych.driver.session import Session  # noqa: E402
from triptych.driver.stream import Completion, Delta  # noqa: E402
from triptych.protocol.channels import Connection  # noqa: E402
from triptych.protocol.config import DEMO_CHECKPOINT, PipelineConfig  # noqa: E402
from triptych.protocol.messages import Accepted  # noqa: E402
from triptych.protocol.run_dir import follow_endpoint, submit_endpoint  # noqa: E402
from triptych.protocol.sampling import SamplingParams  # noqa: E402
from triptych.workers.execute.engine import Engine  # noqa: E402
from triptych.workers.execute.model.build import build_runner  # noqa: E402
from triptych.workers.execute.scheduling.scheduler import Scheduler  # noqa: E402
from triptych.workers.execute.scheduling.sequence import Sequence  # noqa: E402

PROMPT_TOKENS, OUTPUT_TOKENS, TURNS = 64, 800, 5
BATCHES = (1, 8, 32)
Run = tuple[float, float]  # median time between tokens in ms, tokens per second


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--turns", type=int, default=TURNS)
    turns = arguments.parse_args().turns
    config = PipelineConfig.from_options()
    with tempfile.TemporaryDirectory() as folder, Driver(config=config) as driver:
        engine = make_engine(config, Path(folder))
        results = {f"batch {batch}": compare(engine, driver, batch, turns) for batch in BATCHES}
    about = environment("torch", "transformers", "pyzmq")
    print(json.dumps({"what": "pipeline_overhead", **about, "turns": turns, "results": results}))


def make_engine(config: PipelineConfig, folder: Path) -> Engine:
    runner, card = build_runner(
        config.model, config.cache, config.scheduler, model_dir=DEMO_CHECKPOINT, run_dir=folder,
        progress=lambda _done, _total: None,
    )  # fmt: skip
    runner.warm_up()
    scheduler = Scheduler(
        config.scheduler, page_size=card.page_size, num_pages=card.num_pages, max_model_len=card.max_model_len
    )
    return Engine(scheduler, runner, depth=int(runner.overlaps))


def compare(engine: Engine, driver: Driver, batch: int, turns: int) -> dict[str, Any]:
    alone: list[Run] = []
    piped: list[Run] = []
    run_engine(engine, batch, 0)
    run_pipeline(driver, batch, 0)
    for turn in range(turns):
        alone.append(run_engine(engine, batch, turn + 1))
        piped.append(run_pipeline(driver, batch, turn + 1))
    gaps, rates = zip(*alone, strict=True)
    piped_gaps, piped_rates = zip(*piped, strict=True)
    return {
        "one_process_itl_p50_ms": statistics.median(gaps),
        "three_processes_itl_p50_ms": statistics.median(piped_gaps),
        "added_itl_ms": statistics.median(b - a for a, b in zip(gaps, piped_gaps, strict=True)),
        "one_process_tokens_per_s": statistics.median(rates),
        "three_processes_tokens_per_s": statistics.median(piped_rates),
        "throughput_ratio": statistics.median(b / a for a, b in zip(rates, piped_rates, strict=True)),
    }


def run_engine(engine: Engine, batch: int, turn: int) -> Run:
    times: dict[int, list[float]] = {i: [] for i in range(batch)}
    began = time.perf_counter()
    for index, prompt in enumerate(random_prompts(batch, PROMPT_TOKENS, turn)):
        tokens = np.zeros(PROMPT_TOKENS + OUTPUT_TOKENS, np.int32)
        tokens[:PROMPT_TOKENS] = prompt
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        engine.add(
            Sequence(
                key=(index, turn), tokens=tokens, num_prompt_tokens=PROMPT_TOKENS, num_tokens=PROMPT_TOKENS,
                params=params, seed=0, arrival=index,
            )
        )  # fmt: skip
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        if outputs is not None:
            for key in outputs.progress.keys:
                times[key[0]].append(now)
            for key in outputs.progress.finished:
                engine.release(key)
    return summarise(times, began)


class Stopwatch:
    """A listener that notes when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.done = threading.Event()

    def on_accepted(self, accepted: Accepted) -> None:
        pass

    def on_delta(self, delta: Delta) -> None:
        self.times += [time.perf_counter()] * len(delta.token_ids)

    def on_end(self, completion: Completion, error: Any) -> None:
        self.done.set()


def run_pipeline(driver: Driver, batch: int, turn: int) -> Run:
    service = driver.config.service
    doors = submit_endpoint(driver.run_dir, service), follow_endpoint(driver.run_dir, service)
    session = Session(Connection(*doors)).start()
    watches = [Stopwatch() for _ in range(batch)]
    options = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    began = time.perf_counter()
    for index, (watch, prompt) in enumerate(zip(watches, random_prompts(batch, PROMPT_TOKENS, turn), strict=True)):
        session.submit(f"b{batch}-{turn}-{index}", request_map(prompt, None, None, options), watch)
    for watch in watches:
        watch.done.wait()
    session.close()
    return summarise({i: watch.times for i, watch in enumerate(watches)}, began)


def summarise(times: dict[int, list[float]], began: float) -> Run:
    assert all(len(t) == OUTPUT_TOKENS for t in times.values()), "a request has too few tokens"
    gaps = np.concatenate([np.diff(t) for t in times.values()])
    elapsed = max(t[-1] for t in times.values()) - began
    return float(np.median(gaps)) * 1e3, len(times) * OUTPUT_TOKENS / elapsed


if __name__ == "__main__":
    main()
