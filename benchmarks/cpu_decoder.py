"""How fast does the CPU decode? Some model shapes with random weights, in bfloat16, int8 and int4, through the engine.

W1: 32 prompts of 32..512 tokens at once, 32..128 tokens each (output tokens per second). W2: one stream, 128 in and 128
out (decoded tokens per second). W3: one prompt of 1024 tokens (prompt tokens per second). Prints one JSON line, with
the memory and matrix rates measured in the same run, and each workload's share of them: of memory for W2, as if every
token read every weight (in bfloat16 it may read less of the head, see decision 0070), of arithmetic for W3. Arguments
choose models, formats, levels of the kernels (``--kernels amx avx512`` compares both) and repeats.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_models import SHAPES, make_model, num_weights, weight_bytes
from benchmarks.report import best_of, environment, publish
from benchmarks.sequences import make_engine, make_sequence
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import Runner

MAX_TOKEN_ID = 8000
MAX_MODEL_LEN = 2048
WORKLOADS = ("W1", "W2", "W3")


class Loaded(NamedTuple):
    """A model ready to run."""

    runner: Runner
    config: SchedulerConfig
    card: ModelCard
    load_s: float

    @property
    def depth(self) -> int:
        """Steps that are planned while another one runs, as in a server."""
        return int(self.runner.overlaps)


def main() -> None:
    parser = argparse.ArgumentParser()
    dense = ["llama-6m", "smollm2-135m", "qwen3-0.6b", "gemma3-270m", "qwen3.5-0.8b"]  # cpu_experts.py has others
    parser.add_argument("--models", nargs="*", default=dense, choices=list(SHAPES))
    formats = ["bf16", "int8", "int4", "transformers"]
    parser.add_argument("--formats", nargs="*", default=formats[:3], choices=formats)
    parser.add_argument("--kernels", nargs="*", default=["auto"])
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    cases = {}
    for model, form, kernels in product(arguments.models, arguments.formats, arguments.kernels):
        name = " ".join([model, form, *([kernels] if kernels != "auto" else [])])
        loaded = load(model, form, kernels=kernels)
        cases[name] = measure(loaded, model, form, workloads=arguments.workloads, repeats=arguments.repeats)
    report = {"what": "cpu_decoder", **environment("torch", "transformers"), "seed": 0, "repeats": arguments.repeats}
    publish({**report, "cases": cases})


def measure(loaded: Loaded, model: str, form: str, *, workloads: list[str], repeats: int) -> dict[str, object]:
    """Medians of one model in one format, with machine limits measured before each workload."""
    case: dict[str, object] = {"load_s": round(loaded.load_s, 2), "depth": loaded.depth}
    layers, head = num_weights(SHAPES[model])
    run_workload("W2", 0, loaded)  # warm-up
    for name in workloads:
        read_rate, product_rate = memory_rate(), matrix_rate()
        rates = [run_workload(name, repeat, loaded) for repeat in range(repeats)]
        rate = statistics.median(rates)
        entry = {
            "tokens_per_s": round(rate, 1),
            "all": [round(r, 1) for r in rates],
            "read_gb_per_s": round(read_rate / 1e9, 1),
            "matrix_gflop_per_s": round(product_rate / 1e9),
        }
        if name == "W2":
            layer_bytes, head_bytes = weight_bytes(form)
            entry["of_memory"] = round(rate * (layers * layer_bytes + head * head_bytes) / read_rate, 3)
        if name == "W3":
            entry["of_arithmetic"] = round(rate * 2 * layers / product_rate, 3)
        case[name] = entry
    return case


def load(model: str, form: str, *, draft: str | None = None, **options: Any) -> Loaded:
    """``draft`` is the shape of a draft model. ``options`` are those of ``ModelConfig``."""
    folder = make_model(model, has_mxfp4=form == "mxfp4")
    scheduler_config = SchedulerConfig(max_num_seqs=32)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as run_dir:
        runner, card = build_runner(
            ModelConfig(
                model=str(folder),
                device="cpu",
                max_model_len=MAX_MODEL_LEN,
                backend="transformers" if form == "transformers" else "native",
                quantization=form if form.startswith("int") else "none",
                **options,
            ),
            CacheConfig(num_pages=2048),
            scheduler_config,
            model_dir=folder,
            draft_folder=make_model(draft) if draft else None,
            run_dir=Path(run_dir),
        )
    runner.warm_up()
    if runner.proposer is not None:
        runner.proposer.warm_up(no_progress, is_first=True)
        runner.proposer.measure_costs(runner.decode_s)
    return Loaded(runner, scheduler_config, card, time.perf_counter() - start)


def run_workload(name: str, repeat: int, loaded: Loaded) -> float:
    """Tokens per second of one run."""
    sequences = make_sequences(name, repeat)
    if name == "W2":  # minus the time of one prompt and one token
        seconds = [run_all([sequence], loaded) for sequence in sequences]
        return (sequences[1].max_tokens - 1) / (seconds[1] - seconds[0])
    elapsed = run_all(sequences, loaded)
    if name == "W3":
        return sequences[0].num_prompt_tokens / elapsed
    return sum(sequence.max_tokens for sequence in sequences) / elapsed


def make_sequences(name: str, repeat: int) -> list[Sequence]:
    """Lengths depend only on the workload; token ids on the repeat too, so that no prefix is cached."""
    shape, tokens = random.Random(f"{name}/shape"), random.Random(f"{name}/{repeat}/tokens")
    lengths = {
        "W1": [(shape.randint(32, 512), shape.randint(32, 128)) for _ in range(32)],
        "W2": [(128, 1), (128, 128)],
        "W3": [(1024, 1)],
    }[name]
    return [random_sequence(index, *length, tokens) for index, length in enumerate(lengths)]


def random_sequence(index: int, num_prompt_tokens: int, max_tokens: int, rng: random.Random) -> Sequence:
    return make_sequence(index, [rng.randrange(100, MAX_TOKEN_ID) for _ in range(num_prompt_tokens)], max_tokens)


def run_all(sequences: list[Sequence], loaded: Loaded) -> float:
    """Seconds until all sequences are finished."""
    engine = make_engine(loaded.runner, loaded.card, loaded.config, depth=loaded.depth)
    start = time.perf_counter()
    for sequence in sequences:
        engine.add(sequence)
    while not all(sequence.finish_reason for sequence in sequences):
        engine.step()
    return time.perf_counter() - start


def memory_rate(num_bytes: int = 1 << 30) -> float:
    """Bytes per second read by all threads together."""
    memory = torch.ones(num_bytes // 8, dtype=torch.int64)
    return num_bytes / best_of(memory.max)


def matrix_rate(size: int = 2048) -> float:
    """Operations per second of torch's bfloat16 matrix product."""
    a, b = (torch.ones(size, size, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / best_of(lambda: a @ b)


if __name__ == "__main__":
    main()
