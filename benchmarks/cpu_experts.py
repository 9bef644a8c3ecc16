"""How fast does the CPU decode models with experts? Random weights, in bfloat16, int8 and int4, beside transformers.

``--model gpt-oss-0.6b`` is also measured in the four bits in which its experts are published, mxfp4.

Decodes of 1, 8 and 32 streams (tokens per second in total, 32 in and 64 out) and a prompt of 512 tokens (its tokens per
second), of every format in turn. Prints one JSON line, with the memory rate measured in the same run and the share of
it that decoding reaches: a step reads the weights of the experts chosen by some row, as many as expected from random
choices, and all other weights.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_decoder import Loaded, load, memory_rate, random_sequence, run_all
from benchmarks.cpu_models import SHAPES, num_step_weights, num_weights, weight_bytes
from benchmarks.report import environment, publish

MODELS = [name for name, shape in SHAPES.items() if "num_experts" in shape]
FORMATS = ("bf16", "int8", "int4", "mxfp4", "transformers")
ROWS = (1, 8, 32)
PROMPT, NUM_IN, NUM_OUT = 512, 32, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=MODELS[0], choices=MODELS)
    parser.add_argument("--formats", nargs="*", choices=FORMATS)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.model]
    known = [form for form in FORMATS if form != "mxfp4" or shape["model_type"] == "gpt_oss"]
    loaded = {form: load(arguments.model, form) for form in arguments.formats or known}
    samples: dict[str, dict[str, list[float]]] = {form: {} for form in loaded}
    rates = []
    for repeat in range(arguments.repeats + 1):
        rates.append(memory_rate())
        for form, model in loaded.items():
            for name, rate in measure(model, repeat).items():
                if repeat:  # the first warms up
                    samples[form].setdefault(name, []).append(rate)
    read_rate = statistics.median(rates)
    cases = {
        form: {name: entry(shape, form, name, found, read_rate) for name, found in of_form.items()}
        for form, of_form in samples.items()
    }
    report = {
        "what": "cpu_experts", **environment("torch", "transformers"), "seed": 0, "repeats": arguments.repeats,
        "depth": {form: model.depth for form, model in loaded.items()},
        "config": {"model": arguments.model, **shape},
        "read_gb_per_s": round(read_rate / 1e9, 1),
    }  # fmt: skip
    publish({**report, "cases": cases})


def measure(model: Loaded, repeat: int) -> dict[str, float]:
    """Tokens per second."""
    rng = random.Random(repeat)
    found = {}
    for rows in ROWS:
        short, long = (
            run_all([random_sequence(i, NUM_IN, count, rng) for i in range(rows)], model) for count in (1, NUM_OUT)
        )
        found[f"decode of {rows}"] = rows * (NUM_OUT - 1) / (long - short)
    found[f"prompt of {PROMPT}"] = PROMPT / run_all([random_sequence(0, PROMPT, 1, rng)], model)
    return found


def entry(shape: dict[str, Any], form: str, name: str, samples: list[float], read_rate: float) -> dict[str, float]:
    rate = statistics.median(samples)
    found = {"tokens_per_s": round(rate, 1), "least": round(min(samples), 1), "most": round(max(samples), 1)}
    if name.startswith("decode"):
        rows = int(name.rpartition(" ")[2])
        found["of_memory"] = round(rate / rows * step_bytes(shape, form, rows) / read_rate, 3)
    return found


def step_bytes(shape: dict[str, Any], form: str, rows: int) -> float:
    """Bytes read by a step with that many rows."""
    layer_bytes, head_bytes = weight_bytes(form)
    return num_step_weights(shape, rows) * layer_bytes + num_weights(shape)[1] * head_bytes


if __name__ == "__main__":
    main()
