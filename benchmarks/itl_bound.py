"""Time between tokens of decoding sequences while long prompts keep arriving, with and without ``itl_target_ms``.

The model is the hash LM with a simulated cost: milliseconds per step and microseconds per token. Prints one JSON line.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import environment, publish
from benchmarks.sequences import make_sequence
from triptych.protocol.config import SchedulerConfig
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.scheduling.scheduler import Scheduler
from triptych.workers.execute.scheduling.sequence import Key, Sequence

VOCAB_SIZE = 251
NUM_DECODES = 16
NUM_PROMPTS = 40
WARM_UP = 4  # prompts during which costs are learned
PROMPT_TOKENS = 3000
PROMPT_EVERY_S = 0.25
STEP_MS, TOKEN_US = 2.0, 20.0  # a full chunk of 512 costs 12 ms
TARGET_MS = 6.0
PAGE_SIZE, NUM_PAGES = 16, 8192


def main() -> None:
    report = {
        "what": "itl_bound",
        **environment("numpy"),
        "config": {
            "num_decodes": NUM_DECODES, "prompt_tokens": PROMPT_TOKENS, "prompt_every_s": PROMPT_EVERY_S,
            "step_ms": STEP_MS, "token_us": TOKEN_US, "prefill_chunk": 512,
        },
        "warm_up": WARM_UP,
        "inter_token_ms": {"no target": measure(None), f"target {TARGET_MS} ms": measure(TARGET_MS)},
    }  # fmt: skip
    publish(report)


def measure(target_ms: float | None) -> dict[str, float]:
    engine = make_engine(target_ms)
    for index in range(NUM_DECODES):
        engine.add(random_sequence(index, num_tokens=32, max_tokens=100_000))
    while len(engine.scheduler.rows) < NUM_DECODES:
        engine.step()
    times, num_sent, begun = defaultdict(list), 0, time.monotonic_ns()
    first_token_s: list[float] = []
    while len(first_token_s) < NUM_PROMPTS:
        if num_sent < NUM_PROMPTS and time.monotonic_ns() - begun >= num_sent * PROMPT_EVERY_S * 1e9:
            engine.add(random_sequence(NUM_DECODES + num_sent, num_tokens=PROMPT_TOKENS, max_tokens=1))
            num_sent += 1
        outputs = engine.step()
        assert outputs is not None
        for key in outputs.progress.keys:
            if key[0] < NUM_DECODES and len(first_token_s) >= WARM_UP:
                times[key].append(outputs.collected_at)
            elif key[0] >= NUM_DECODES:
                sent_at = begun + (key[0] - NUM_DECODES) * PROMPT_EVERY_S * 1e9
                first_token_s.append((outputs.collected_at - sent_at) / 1e9)
        for key in outputs.progress.finished:
            engine.release(key)
    return summary(times, first_token_s)


def summary(times: dict[Key, list[int]], first_token_s: list[float]) -> dict[str, float]:
    gaps_ms = [(later - earlier) / 1e6 for series in times.values() for earlier, later in pairwise(series)]
    percentiles = dict(zip(("p50", "p90", "p99"), np.percentile(gaps_ms, [50, 90, 99]).round(3).tolist(), strict=True))
    return {**percentiles, "tokens": len(gaps_ms), "prompts_ttft_s": round(float(np.median(first_token_s)), 3)}


def make_engine(target_ms: float | None) -> Engine:
    config = SchedulerConfig(max_num_seqs=64, prefill_chunk=512, itl_target_ms=target_ms)
    scheduler = Scheduler(config, page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_model_len=1 << 20)
    runner = HashRunner(VOCAB_SIZE, num_pages=NUM_PAGES, page_size=PAGE_SIZE, step_ms=STEP_MS, token_us=TOKEN_US)
    return Engine(scheduler, runner, clock=time.monotonic_ns)


def random_sequence(index: int, *, num_tokens: int, max_tokens: int) -> Sequence:
    prompt = np.random.default_rng(index).integers(1, VOCAB_SIZE, num_tokens).tolist()
    return make_sequence(index, prompt, max_tokens)


if __name__ == "__main__":
    main()
