"""How many requests does ``triptych replay`` simulate per minute on one core, and how close are its results to a real
run?

Prints one JSON line.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import environment, publish
from triptych import Driver
from triptych.launch.replay.costs import RecordedSteps
from triptych.launch.replay.options import EngineConfig
from triptych.launch.replay.recorded_arrivals import arrivals_of_trace
from triptych.launch.replay.router import make_router
from triptych.launch.replay.settings import Recorded, make_scheduler, merge
from triptych.launch.replay.simulate import simulate
from triptych.launch.replay.verify import verify
from triptych.launch.replay.workload import Synthetic, draw_arrivals, parse_lengths
from triptych.workers.execute.scheduling.cost import Prices

PRICES = Prices(step=5.0, prefill_token=0.01, decode=0.01, read=1e-6)  # of an imagined GPU
ENGINE = {"max_num_seqs": 256, "prefill_chunk": 2048, "max_num_batched_tokens": 4096, "num_pages": 20_000}
WORKLOADS: dict[str, dict[str, Any]] = {
    "prompts of 128": {"num_requests": 100_000, "prompt_tokens": "128"},
    "prompts of 64 to 512": {"num_requests": 20_000, "prompt_tokens": "64-512"},
    "prefixes of 512": {
        "num_requests": 20_000,
        "prompt_tokens": "16-64",
        "num_prefixes": 50,
        "num_prefix_tokens": 512,
    },
}
OUTPUT_TOKENS = 32
RATE = 600.0  # per second, more than is served: batches are full
NUM_REAL = 400


def main() -> None:
    report = {
        "what": "replay",
        **environment("numpy"),
        "config": {**ENGINE, "output_tokens": OUTPUT_TOKENS, "rate": RATE},
        "simulated": {name: measure(**workload) for name, workload in WORKLOADS.items()},
        "real_and_simulated": compare(),
    }
    publish(report)


def measure(*, num_requests: int, prompt_tokens: str, **prefixes: int) -> dict[str, float]:
    """Wall time and processor time in seconds; the latter is what an otherwise idle core would take."""
    spec = Synthetic(
        num_requests=num_requests,
        rate=RATE,
        prompt_tokens=parse_lengths("prompt_tokens", prompt_tokens),
        output_tokens=parse_lengths("output_tokens", str(OUTPUT_TOKENS)),
        **prefixes,
    )
    config = EngineConfig.from_options(**ENGINE)
    wall, processor = time.perf_counter(), time.process_time()
    report = simulate(
        draw_arrivals(spec), lambda: make_scheduler(config, 4096), PRICES, router=make_router("round_robin", 16)
    )
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return {
        "requests": num_requests,
        "wall_s": round(wall, 2),
        "processor_s": round(processor, 2),
        "requests_a_minute": round(60 * num_requests / processor),
        "steps": report["steps"],
        "decodes_per_step": report["decodes_per_step"],
        "us_a_token": round(1e6 * processor / (num_requests * OUTPUT_TOKENS), 2),
        "cache_hit_rate": report["cache_hit_rate"],
    }


def compare() -> dict[str, Any]:
    """A pipeline of the hash LM, whose steps cost 5 ms, and the simulation of its trace with fitted costs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        real = run_pipeline(path)
        recorded = Recorded.read(path)
        config = merge(recorded.options, EngineConfig.from_options(), ())
        simulated = simulate(
            arrivals_of_trace(path),
            lambda: make_scheduler(config, recorded.max_model_len),
            RecordedSteps.read(path).prices(path),
            router=make_router("round_robin", 16),
        )
        verdict = verify(path)
    names = ("output_tokens_per_second", "ttft_ms", "inter_token_ms")
    return {
        "real": real,
        "simulated": {name: simulated[name] for name in names},
        "replayed": {"exact": verdict.is_exact, "steps": verdict.num_steps, "requests": verdict.num_requests},
    }


def run_pipeline(path: Path) -> dict[str, Any]:
    with Driver("hash-lm", hash_step_ms=5.0, hash_token_us=10.0, max_num_seqs=32, trace=str(path)) as driver:
        begun = time.monotonic()
        streams = [driver.submit([i % 250 + 1] * (20 + i % 90), max_tokens=10 + i % 50) for i in range(NUM_REAL)]
        answers = [stream.result(120) for stream in streams]
        elapsed_s = time.monotonic() - begun
    ttfts = sorted(answer.ledger["ttft_ms"] for answer in answers)
    gaps = sorted(answer.ledger["inter_token_ms"]["p50"] for answer in answers)
    return {
        "output_tokens_per_second": round(sum(len(answer.token_ids) for answer in answers) / elapsed_s, 1),
        "ttft_ms": {"p50": ttfts[len(ttfts) // 2], "p90": ttfts[9 * len(ttfts) // 10]},
        "inter_token_ms": {"p50": gaps[len(gaps) // 2]},
    }


if __name__ == "__main__":
    main()
