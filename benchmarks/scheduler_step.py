"""What does scheduling cost? Planning, building and applying a step of 256 decodes, with few and with many waiting.

No model runs. Prints one JSON line; times in milliseconds.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import environment, publish, spread
from benchmarks.sequences import make_sequence
from triptych.protocol.config import SchedulerConfig
from triptych.workers.execute.batch import build_inputs
from triptych.workers.execute.scheduling.scheduler import Scheduler
from triptych.workers.execute.scheduling.sequence import Sequence

NUM_DECODES = 256
NUM_WAITING = (0, 10_000)
PROMPT_TOKENS = 1000
OUTPUT_TOKENS = 1040
PAGE_SIZE = 16
PAGES_EACH = 128
NUM_STEPS = 400
WARM_UP = 50


def main() -> None:
    report = {
        "what": "scheduler_step",
        **environment("numpy"),
        "config": {"num_decodes": NUM_DECODES, "prompt_tokens": PROMPT_TOKENS, "page_size": PAGE_SIZE},
        "warm_up": WARM_UP,
        "milliseconds": {f"{num_waiting} waiting": measure(num_waiting) for num_waiting in NUM_WAITING},
    }
    publish(report)


def measure(num_waiting: int) -> dict[str, dict[str, float]]:
    scheduler = make_scheduler(num_waiting)
    marks = [step(scheduler) for _ in range(WARM_UP + NUM_STEPS)][WARM_UP:]
    parts = {
        name: spread([1e3 * (end - begin) for begin, end in spans])
        for name, spans in zip(("plan", "build", "apply"), zip(*map(pairwise, marks), strict=True), strict=True)
    }
    return {**parts, "whole": spread([1e3 * (mark[-1] - mark[0]) for mark in marks])}


def step(scheduler: Scheduler) -> tuple[float, float, float, float]:
    """One step without a model; the times before, between and after its parts."""
    begun = time.perf_counter()
    plan = scheduler.plan()
    assert plan is not None
    planned = time.perf_counter()
    inputs = build_inputs(plan, scheduler.running, scheduler.rows, page_size=PAGE_SIZE)
    built = time.perf_counter()
    scheduler.apply(plan, [1] * len(inputs.sampled))
    return begun, planned, built, time.perf_counter()


def make_scheduler(num_waiting: int) -> Scheduler:
    """A scheduler with 256 decoding sequences; there is no memory for another one to start."""
    config = SchedulerConfig(max_num_seqs=8192, max_num_batched_tokens=16_384, prefill_chunk=1024, safety_margin=0.5)
    scheduler = Scheduler(config, page_size=PAGE_SIZE, num_pages=NUM_DECODES * PAGES_EACH, max_model_len=4096)
    for index in range(NUM_DECODES):
        scheduler.add(sequence_of_ones(index))
    while len(scheduler.rows) < NUM_DECODES:
        step(scheduler)
    for index in range(num_waiting):
        scheduler.add(sequence_of_ones(NUM_DECODES + index))
    return scheduler


def sequence_of_ones(index: int) -> Sequence:
    """Prompts begin differently, so that the prefix cache contains all of their pages and shares none."""
    sequence = make_sequence(index, [index, *[1] * (PROMPT_TOKENS - 1)], OUTPUT_TOKENS)
    sequence.stop_ids = frozenset({2})
    return sequence


if __name__ == "__main__":
    main()
