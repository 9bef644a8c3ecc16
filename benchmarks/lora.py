"""What do LoRA adapters cost on a CPU? Eight streams, without adapters, all with one, or each with another.

Streams of 16 prompt tokens and 24 output tokens run on random weights of a real shape, with adapters of rank 16 on all
linear layers. Each case runs in turns with the same streams on a model without adapters. One thread computes, and its
processor time counts, so that other load has little effect. Prints one JSON line with each case's tokens per second
relative to those without adapters, for prompts and for answers: of the fastest run of each, and the median of all
pairs. "none" has eight loaded adapters that no stream uses, "half" has four streams without one and four with different
ones.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_decoder import Loaded, load, random_sequence
from benchmarks.cpu_models import RANK, SHAPES, make_adapter, make_model
from benchmarks.report import environment, publish
from benchmarks.sequences import make_engine

NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 16, 24
NUM_STREAMS = 8
ONE_THREAD: dict[str, Any] = {"threads": 1, "overlap": False}
CASES = {
    "none": [0] * 8,
    "one": [1] * 8,
    "half": [1, 0, 2, 0, 3, 0, 4, 0],
    "eight": [1, 2, 3, 4, 5, 6, 7, 8],
}


class Times(NamedTuple):
    prompts_s: float  # until the last first token
    answers_s: float  # from then on


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=["smollm2-135m", "qwen3-0.6b"], choices=list(SHAPES))
    parser.add_argument("--formats", nargs="*", default=["bf16", "int8"], choices=["bf16", "int8"])
    parser.add_argument("--repeats", type=int, default=6)
    arguments = parser.parse_args()
    cases = {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            modules = tuple(f"{n}={make_adapter(Path(folder) / str(n), make_model(model), n)}" for n in range(1, 9))
            for form in arguments.formats:
                plain = load(model, form, **ONE_THREAD)
                adapted = load(model, form, lora_modules=modules, **ONE_THREAD)
                cases[f"{model} {form}"] = measure(plain, adapted, arguments.repeats)
    report = {"what": "lora", **environment("torch"), **vars(arguments), "rank": RANK, "streams": NUM_STREAMS}
    publish({**report, "cases": cases})


def measure(plain: Loaded, adapted: Loaded, repeats: int) -> dict[str, object]:
    pairs: dict[str, list[tuple[Times, Times]]] = {name: [] for name in CASES}
    for repeat in range(repeats + 1):
        for name, adapters in CASES.items():
            pair = run(plain, CASES["none"], repeat), run(adapted, adapters, repeat)
            if repeat:  # the first one warms up
                pairs[name].append(pair)
    quickest = min(without.answers_s for found in pairs.values() for without, _ in found)
    case: dict[str, object] = {"tokens_per_s_without": round(NUM_STREAMS * NUM_OUTPUT_TOKENS / quickest, 1)}
    return case | {name: shares(found) for name, found in pairs.items()}


def shares(pairs: list[tuple[Times, Times]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for index, what in enumerate(("prompts", "answers")):
        without, times = ([each[side][index] for each in pairs] for side in (0, 1))
        ratios = [a / b for a, b in zip(without, times, strict=True)]
        found |= {
            what: round(min(without) / min(times), 3),
            f"{what}_of_pairs": round(statistics.median(ratios), 3),
        }
    return found


def run(loaded: Loaded, adapters: list[int], repeat: int) -> Times:
    tokens = random.Random(repeat)
    sequences = [random_sequence(i, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS, tokens) for i in range(NUM_STREAMS)]
    engine = make_engine(loaded.runner, loaded.card, loaded.config)
    for sequence, adapter in zip(sequences, adapters, strict=True):
        sequence.adapter, sequence.cache_salt = adapter, str(adapter)
        engine.add(sequence)
    start = time.process_time()
    while not all(sequence.num_output_tokens for sequence in sequences):
        engine.step()
    middle = time.process_time()
    while engine.has_work:
        engine.step()
    return Times(middle - start, time.process_time() - middle)


if __name__ == "__main__":
    main()
