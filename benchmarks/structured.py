"""What does a structured row cost per step? Prints one JSON line.

With the demo model, whose steps hide the masks, and with the sampler alone on a vocabulary of 128 k tokens, made of the
words in the standard library's sources: there masks are wide, and no forward pass hides them.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import Any, Protocol

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import environment, publish, spread
from benchmarks.sequences import make_engine, make_sequence
from triptych.protocol.config import DEMO_CHECKPOINT, PipelineConfig
from triptych.protocol.model_card import ModelCard
from triptych.protocol.tokenizer_files import TokenizerFacts, save_tokenizer
from triptych.workers.execute.grammar.masks import MaskMaker
from triptych.workers.execute.grammar.matcher import GrammarCompiler
from triptych.workers.execute.hash_build import byte_tokenizer_json
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.sampling.sampler import Sampler
from triptych.workers.execute.scheduling.sequence import Sequence

BATCHES, VOCAB_SIZE, STEPS, TURNS, SEED = (1, 32), 128_000, 60, 4, 0
PARAMS: dict[str, dict[str, Any]] = {"greedy": {}, "temperature": {"temperature": 1.0}}
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"enum": ["file", "folder"]}},
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    },
}
GRAMMAR = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
Step = Callable[[], object]


class Make(Protocol):
    """The steps of a batch, whose rows are all structured or all not."""

    def __call__(self, batch: int, params: dict[str, Any], *, held: bool) -> Step: ...


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--turns", type=int, default=TURNS)
    turns = arguments.parse_args().turns
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, make in (("demo model", demo_steps), (f"sampler, {VOCAB_SIZE} tokens", sampler_steps)):
        with tempfile.TemporaryDirectory() as folder:
            step = make(Path(folder))
            for batch in BATCHES:
                for what, params in PARAMS.items():
                    results[f"{name}, {what}, batch {batch}"] = compare(step, batch, params, turns)
    about = environment("torch", "llguidance")
    config = {"steps": STEPS, "schema": SCHEMA}
    publish({"what": "structured", "unit": "ms", **about, "config": config, "seed": SEED, "results": results})


def compare(make: Make, batch: int, params: dict[str, Any], turns: int) -> dict[str, Any]:
    """Steps without and with structured rows, in turns, in ms; and the additional cost of such a row.

    Processor time is that of all threads. It shows the cost even when others use the machine.
    """
    wall: dict[bool, list[float]] = {False: [], True: []}
    processor: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(turns):
        steps = {held: make(batch, params, held=held) for held in wall}
        for held in list(wall) * STEPS:
            start, start_cpu = perf_counter_ns(), process_time_ns()
            steps[held]()
            wall[held].append((perf_counter_ns() - start) / 1e6)
            processor[held].append((process_time_ns() - start_cpu) / 1e6)
    return {
        "free": spread(wall[False]),
        "held": spread(wall[True]),
        "more a row": more_a_row(wall, batch),
        "more a row, processor": more_a_row(processor, batch),
    }


def more_a_row(times: dict[bool, list[float]], batch: int) -> float:
    return round(statistics.median(b - a for a, b in zip(times[False], times[True], strict=True)) / batch, 4)


def sequences(batch: int, params: dict[str, Any], compiler: GrammarCompiler | None) -> list[Sequence]:
    made = []
    for index in range(batch):
        sequence = make_sequence(index, [1 + index] * 4, 4 * STEPS, seed=index, **params)
        sequence.grammar = compiler.compile(GRAMMAR) if compiler else None
        made.append(sequence)
    return made


def demo_steps(folder: Path) -> Make:
    config = PipelineConfig.from_options(prefix_cache=False)
    built = [
        build_runner(
            config.model, config.cache, config.scheduler, model_dir=DEMO_CHECKPOINT, run_dir=folder,
        )
        for _ in range(2)
    ]  # fmt: skip
    card = built[0][1]
    compiler = GrammarCompiler(folder, card)

    def make(batch: int, params: dict[str, Any], *, held: bool) -> Step:
        engine = make_engine(built[held][0], card, config.scheduler, prefix_cache=False)
        for sequence in sequences(batch, params, compiler if held else None):
            engine.add(sequence)
        engine.step()
        return engine.step

    return make


def sampler_steps(folder: Path) -> Make:
    save_tokenizer(folder, large_tokenizer_json(), TokenizerFacts(
        vocab_size=VOCAB_SIZE, chat_template=None, special_tokens={}, bos_token_id=None
    ))  # fmt: skip
    card = ModelCard(
        model="none", model_type="none", backend="none", num_parameters=0, dtype="float32", device="cpu",
        vocab_size=VOCAB_SIZE, max_model_len=1024, eos_token_ids=(0,), page_size=16, num_pages=64, max_num_seqs=32,
        max_live=48, load_s=0.0,
    )  # fmt: skip
    compiler, sampler, masks = GrammarCompiler(folder, card), Sampler((0,)), MaskMaker()
    noise = torch.randn(max(BATCHES), VOCAB_SIZE, generator=torch.Generator().manual_seed(SEED)) * 3

    def make(batch: int, params: dict[str, Any], *, held: bool) -> Step:
        rows = sequences(batch, params, compiler if held else None)

        def step() -> None:
            logits = noise[:batch].clone()
            for row, token_id in zip(rows, sampler.sample(logits, rows, masks.begin(rows)).token_ids, strict=True):
                row.append(int(token_id))

        return step

    return make


def large_tokenizer_json() -> str:
    """Bytes, and the words of the standard library's sources with their prefixes, as a byte-level vocabulary."""
    tokenizer = json.loads(byte_tokenizer_json())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        for word in re.findall(
            r"[ ]?[A-Za-z0-9_.]+|[^\sA-Za-z0-9]+", path.read_text(encoding="utf-8", errors="ignore")
        ):
            for end in range(2, min(len(word), 16) + 1):
                if word.isascii() and len(vocab) < VOCAB_SIZE:
                    vocab.setdefault(word[:end].replace(" ", "Ġ"), len(vocab))
        if len(vocab) >= VOCAB_SIZE:
            break
    return json.dumps(tokenizer)


if __name__ == "__main__":
    main()
