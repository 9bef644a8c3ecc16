"""What does sampling cost per step with a large vocabulary? Prints one JSON line; ms of processor time per step of 32
rows.

Processor time is the same when others use the machine. Logits fall with the logarithm of their rank, like those of
language models; there is also a flat row, for which few candidates are not enough.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import process_time_ns
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import environment, publish, spread
from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.sampling.sampler import Sampler
from triptych.workers.execute.scheduling.sequence import Sequence

VOCAB_SIZE, BATCH, SEED, WARM_UP, REPEATS = 151_936, 32, 0, 2, 15
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "top_k, top_p, min_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeats", type=int, default=REPEATS)
    repeats = arguments.parse_args().repeats
    torch.set_num_threads(1)
    results = {}
    for shape, logits in (("peaked", peaked()), ("flat", flat())):
        for name, params in PARAMS.items():
            results[f"{name}, {shape}"] = spread(steps(logits, SamplingParams(max_tokens=None, **params), repeats))
    config = {"vocab_size": VOCAB_SIZE, "batch": BATCH, "warm_up": WARM_UP}
    publish({"what": "sampler", "unit": "ms", **environment("torch"), "config": config, "results": results})


def steps(logits: torch.Tensor, params: SamplingParams, repeats: int) -> list[float]:
    tokens = np.arange(1, 9, dtype=np.int32)
    rows = [
        Sequence(key=(i, 0), tokens=tokens, num_prompt_tokens=4, num_tokens=7, params=params, seed=i, arrival=i)
        for i in range(BATCH)
    ]
    sampler, times = Sampler((0,)), []
    for _ in range(WARM_UP + repeats):
        step = logits.clone()
        start = process_time_ns()
        sampler.sample(step, rows)
        times.append((process_time_ns() - start) / 1e6)
    return times[WARM_UP:]


def peaked() -> torch.Tensor:
    """A token's probability is about its rank to the power of -1.5."""
    generator = torch.Generator().manual_seed(SEED)
    ranks = torch.stack([torch.randperm(VOCAB_SIZE, generator=generator) for _ in range(BATCH)])
    return -1.5 * (1 + ranks.float()).log()


def flat() -> torch.Tensor:
    return 3 * torch.randn(BATCH, VOCAB_SIZE, generator=torch.Generator().manual_seed(SEED))


if __name__ == "__main__":
    main()
