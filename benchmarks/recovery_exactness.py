"""How many streams continue as if undisturbed after a crash, by backend, dtype and recovery mode?

Each stream runs once undisturbed and once with a crash at a random token: everything except the prompt, emitted tokens
and the chunk boundaries of the prompt is lost, as in a journal. ``other mates`` is the control: no crash, but other
sequences in the batch. Prints one JSON line.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_models import make_model
from benchmarks.report import environment, publish
from benchmarks.sequences import make_engine, make_sequence
from triptych.protocol.config import DEMO_CHECKPOINT, CacheConfig, ModelConfig, SchedulerConfig
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.scheduling.sequence import Sequence

SEED = 3
NUM_STREAMS, NUM_TOKENS = 48, 80
ROWS, OTHER_ROWS = 16, 5
CRASHES = 3  # of each stream
MODELS = ("llama-6m", "demo")  # the first has random weights: its logits are closer together than a trained model's
KINDS = [("transformers", "float32"), ("transformers", "bfloat16"), ("native", "bfloat16")]
Streams = list[list[int]]


def main() -> None:
    results = {}
    for model, (backend, dtype) in itertools.product(MODELS, KINDS):
        checkpoint = DEMO_CHECKPOINT if model == "demo" else make_model(model)
        with tempfile.TemporaryDirectory() as folder:
            engine_of = make_runner(checkpoint, backend, dtype, Path(folder))
        results[f"{model} {backend} {dtype}"] = measure(engine_of)
    config = {"streams": NUM_STREAMS, "tokens": NUM_TOKENS, "rows": ROWS, "crashes": CRASHES}
    report = {"what": "recovery_exactness", **environment("torch", "transformers"), "seed": SEED, "config": config}
    publish({**report, "identical_streams": results})


def make_runner(checkpoint: Path, backend: str, dtype: str, folder: Path) -> Callable[[int, bool], Engine]:
    cache = CacheConfig(num_pages=2048, prefix_cache=False)
    scheduler = SchedulerConfig(max_num_seqs=ROWS, prefill_chunk=32)
    model = ModelConfig(backend=backend, dtype=dtype, threads=1)
    runner, card = build_runner(model, cache, scheduler, model_dir=checkpoint, run_dir=folder)

    def engine_of(rows: int, replays: bool) -> Engine:
        config = SchedulerConfig(max_num_seqs=rows, prefill_chunk=32)
        return make_engine(runner, card, config, prefix_cache=False, replays=replays)

    return engine_of


def measure(engine_of: Callable[[int, bool], Engine]) -> dict[str, str]:
    undisturbed = run(engine_of(ROWS, False), make_streams())
    expected = [sequence.output_tokens.tolist() for sequence in undisturbed]
    mates = [s.output_tokens.tolist() for s in run(engine_of(OTHER_ROWS, False), make_streams())]
    result = {"other mates": score(mates, expected)}
    for name, replays in (("fast", False), ("exact", True)):
        streams: Streams = []
        for crash in range(CRASHES):
            streams += [
                s.output_tokens.tolist() for s in run(engine_of(ROWS, replays), after_crash(undisturbed, crash))
            ]
        result[name] = score(streams, expected * CRASHES)
    return result


def score(streams: Streams, expected: Streams) -> str:
    return f"{sum(a == b for a, b in zip(streams, expected, strict=True))}/{len(expected)}"


def make_streams() -> list[Sequence]:
    """Half of them greedy, half sampled; prompts of one to four chunks, from the demo model's vocabulary."""
    rng = random.Random(SEED)
    sequences = []
    for index in range(NUM_STREAMS):
        prompt = [rng.randrange(300, 1000) for _ in range(rng.randrange(5, 100))]
        sequences.append(make_stream(index, prompt))
    return sequences


def make_stream(index: int, prompt: list[int]) -> Sequence:
    return make_sequence(index, prompt, NUM_TOKENS, seed=index, temperature=index % 2 * 1.0)


def after_crash(whole: list[Sequence], crash: int) -> list[Sequence]:
    """The streams as recovered from a journal, each at its own token."""
    rng = random.Random(f"{SEED}/{crash}")
    sequences = []
    for old in whole:
        sequence = make_stream(old.key[0], old.tokens[: old.num_prompt_tokens].tolist())
        for token_id in old.output_tokens[: rng.randrange(1, NUM_TOKENS)].tolist():
            sequence.append(token_id)
        sequence.chunk_ends = list(old.chunk_ends)
        sequences.append(sequence)
    return sequences


def run(engine: Engine, sequences: list[Sequence]) -> list[Sequence]:
    waiting = sequences[::-1]
    while waiting or engine.has_work:
        while waiting and len(engine.scheduler.live) < engine.scheduler.config.max_live:
            engine.add(waiting.pop())
        outputs = engine.step()
        for key in outputs.progress.finished if outputs else ():
            engine.release(key)
    return sequences


if __name__ == "__main__":
    main()
