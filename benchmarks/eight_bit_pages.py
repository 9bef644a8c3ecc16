"""What do keys and values in eight bits bring on a CPU? Decodes at long contexts, and the cost for prompts.

Two decoders share the packed weights of a real shape with random numbers: one keeps keys and values in bfloat16, one in
eight bits. Each case runs with both in turns. Prints one JSON line with the medians of both in milliseconds per step,
and the median of the pairs' ratios: for decodes of some rows with a given context each, and for a prompt of 1024 tokens
in chunks of 512. Contexts are not computed: the pages are filled with one number.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_models import SHAPES, make_model
from benchmarks.report import environment, publish
from triptych.workers.execute.kernels.library import load_library
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.checkpoint.mapped import Checkpoint
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.model.native.decoder import NativeDecoder
from triptych.workers.execute.model.native.weights import PackedWeights
from triptych.workers.execute.model.spec.describe import describe_decoder
from triptych.workers.execute.model.spec.ropes import find_ropes
from triptych.workers.execute.model.threads import num_processors
from triptych.workers.execute.step import StepInputs

PAGE_SIZE = 16
NUM_PAGES = 8 * 8192 // PAGE_SIZE
DECODES = ((1, 512), (1, 8192), (8, 512), (8, 2048), (8, 8192))  # rows, tokens of context
PROMPT = ((0, 512), (512, 1024))
FILLING = 0x3C  # 0.0115 in bfloat16, and a scale of that for values of 60


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=["smollm2-135m", "qwen3-0.6b"], choices=list(SHAPES))
    parser.add_argument("--formats", nargs="*", default=["bf16", "int8"], choices=["bf16", "int8"])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    cases = {
        f"{model} {form}": measure(*decoders(model, form), arguments.repeats)
        for model in arguments.models
        for form in arguments.formats
    }
    publish({"what": "eight_bit_pages", **environment("torch"), **vars(arguments), "cases": cases})


def decoders(model: str, form: str) -> tuple[NativeDecoder, NativeDecoder]:
    folder = make_model(model)
    config, tensors, library = AutoConfig.from_pretrained(folder), Checkpoint(folder), load_library()
    weights = PackedWeights(
        describe_decoder(config, tensors.shapes()),
        tensors,
        library=library,
        format_={"bf16": Format.BFLOAT16, "int8": Format.INT8}[form],
        num_threads=num_processors(),
        progress=no_progress,
    )
    ropes = [rope.tables(8192 + 1) for rope in find_ropes(config)]
    sizes: dict[str, Any] = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "num_threads": num_processors()}
    plain, eight = (NativeDecoder(library, weights, ropes, **sizes, eight_bit_pages=is_8) for is_8 in (False, True))
    for pool in (*plain.pools, *eight.pools):
        pool[:] = FILLING
    return plain, eight


def measure(plain: NativeDecoder, eight: NativeDecoder, repeats: int) -> dict[str, Any]:
    steps = {f"{rows} x {context}": [decodes(rows, context)] for rows, context in DECODES}
    steps["prompt of 1024"] = [chunk(*ends) for ends in PROMPT]
    return {name: compare(plain, eight, inputs, repeats) for name, inputs in steps.items()}


def compare(plain: NativeDecoder, eight: NativeDecoder, steps: list[StepInputs], repeats: int) -> dict[str, float]:
    pairs = [(seconds(plain, steps), seconds(eight, steps)) for _ in range(repeats + 1)][1:]
    plain_ms, eight_ms = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
    speed = statistics.median(before / after for before, after in pairs)
    return {"plain_ms": round(plain_ms, 2), "eight_ms": round(eight_ms, 2), "speed": round(speed, 3)}


def seconds(decoder: NativeDecoder, steps: list[StepInputs]) -> float:
    began = time.perf_counter()
    for inputs in steps:
        decoder.run(inputs)
    return time.perf_counter() - began


def decodes(rows: int, context: int) -> StepInputs:
    """The last token of each of ``rows`` sequences, whose pages are in random order."""
    each = context // PAGE_SIZE
    tables = 1 + np.random.default_rng(0).permutation(NUM_PAGES)[: rows * each].reshape(rows, each).astype(np.int32)
    return _step(tables, [(context - 1, context)] * rows)


def chunk(begin: int, end: int) -> StepInputs:
    tables = 1 + np.random.default_rng(0).permutation(NUM_PAGES)[: 1024 // PAGE_SIZE].reshape(1, -1).astype(np.int32)
    return _step(tables, [(begin, end)])


def _step(tables: np.ndarray[Any, np.dtype[np.int32]], ranges: list[tuple[int, int]]) -> StepInputs:
    positions = [np.arange(*ends, dtype=np.int32) for ends in ranges]
    slots = [tables[s, p // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + p % PAGE_SIZE for s, p in enumerate(positions)]
    ends = np.cumsum([len(p) for p in positions], dtype=np.int32)
    return StepInputs(
        token_ids=np.full(ends[-1], 100, np.int32),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        query_starts=np.concatenate([np.zeros(1, np.int32), ends]),
        context_lens=np.array([end for _, end in ranges], np.int32),
        block_tables=tables,
        num_decodes=len(ranges) if len(ranges) == ends[-1] else 0,
        sample_rows=ends - 1,
        sampled=(),
    )


if __name__ == "__main__":
    main()
