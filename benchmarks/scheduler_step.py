"""What deciding costs: planning, building and applying one step of 256 decodes, with few and with many waiting.

No model runs. Prints one JSON line; times in milliseconds.
"""

from __future__ import annotations

import json
import platform
import subprocess
import statistics
import time
from collections.abc import Callable

import numpy as np

from triptych.protocol.config import SchedulerConfig
from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.batch import build_inputs
from triptych.workers.execute.scheduling.audit import take_stats
from triptych.workers.execute.scheduling.scheduler import Scheduler
from triptych.workers.execute.scheduling.sequence import Sequence

NUM_DECODES = 256
NUM_WAITING = (0, 10_000)
PROMPT_TOKENS = 1000
PAGE_SIZE = 16
PAGES_EACH = 128  # for a prompt and 1048 tokens after it
NUM_STEPS = 400
WARM_UP = 50


def make_sequence(index: int) -> Sequence:
    tokens = np.ones(PROMPT_TOKENS + 1040, np.int32)
    params = SamplingParams(max_tokens=1040)
    return Sequence(
        key=(index, 1), tokens=tokens, num_prompt_tokens=PROMPT_TOKENS, num_tokens=PROMPT_TOKENS, params=params,
        seed=0, arrival=index, stop_ids=frozenset({2}),
    )  # fmt: skip


def make_scheduler(num_waiting: int) -> Scheduler:
    """A scheduler with 256 sequences decoding; memory lets nobody else start."""
    config = SchedulerConfig(max_num_seqs=8192, max_num_batched_tokens=16_384, prefill_chunk=1024, safety_margin=0.5)
    scheduler = Scheduler(config, page_size=PAGE_SIZE, num_pages=NUM_DECODES * PAGES_EACH, max_model_len=4096)
    for index in range(NUM_DECODES):
        scheduler.add(make_sequence(index))
    while len(scheduler.rows) < NUM_DECODES:
        step(scheduler)
    for index in range(num_waiting):
        scheduler.add(make_sequence(NUM_DECODES + index))
    return scheduler


def step(scheduler: Scheduler) -> dict[str, float]:
    """One step without a model; what each part of it took."""
    clock: Callable[[], float] = time.perf_counter
    begin = clock()
    plan = scheduler.plan()
    assert plan is not None
    planned = clock()
    inputs = build_inputs(plan, scheduler.running, scheduler.rows, page_size=PAGE_SIZE)
    built = clock()
    scheduler.apply(plan, [1] * len(inputs.sampled))
    take_stats(scheduler)
    applied = clock()
    return {"plan": planned - begin, "build": built - planned, "apply": applied - built, "total": applied - begin}


def measure(num_waiting: int) -> dict[str, float]:
    scheduler = make_scheduler(num_waiting)
    times = [step(scheduler) for _ in range(WARM_UP + NUM_STEPS)][WARM_UP:]
    result = {part: round(1e3 * statistics.median(t[part] for t in times), 3) for part in times[0]}
    totals = sorted(t["total"] for t in times)
    return {**result, "total_p95": round(1e3 * totals[int(0.95 * len(totals))], 3)}


def main() -> None:
    report = {
        "what": "scheduler_step",
        "hardware": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "num_decodes": NUM_DECODES,
        "repeats": NUM_STEPS,
        "warm_up": WARM_UP,
        "median_ms": {f"waiting_{num_waiting}": measure(num_waiting) for num_waiting in NUM_WAITING},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
