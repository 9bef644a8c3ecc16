"""What does speculative decoding save and cost on a CPU, depending on the share of right proposals?

With ``--draft-model`` a draft model computes the requested number of proposals, but these are then replaced by made-up
ones, because models with random weights never agree.

One to eight streams of 128 prompt tokens decode on random weights of a real shape. Their tokens are known from an
earlier run, so a made-up proposer can be right with a given probability for each token. "nothing" never proposes
anything; its cost is that steps are not planned ahead. Each case runs in turns with the same streams without proposals.
Prints one JSON line with medians of the ratios of output tokens per second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_decoder import Loaded, load, random_sequence
from benchmarks.cpu_models import SHAPES
from benchmarks.report import environment, publish
from benchmarks.sequences import make_engine
from triptych.workers.execute.scheduling.proposals import Proposer
from triptych.workers.execute.scheduling.sequence import Sequence

NUM_PROMPT_TOKENS = 128
STREAMS = (1, 2, 4, 8)
RIGHT = (0.0, 0.5, 0.8, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=["smollm2-135m"], choices=list(SHAPES))
    parser.add_argument("--formats", nargs="*", default=["bf16", "int8"], choices=["bf16", "int8"])
    parser.add_argument("--draft-model", choices=list(SHAPES))
    parser.add_argument("--streams", nargs="*", type=int, default=STREAMS)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--num-output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    cases = {}
    for model in arguments.models:
        for form in arguments.formats:
            loaded = load(model, form, draft=arguments.draft_model)
            config = replace(loaded.config, num_speculative_tokens=arguments.num_speculative_tokens)
            loaded = loaded._replace(config=config)
            for num_streams in arguments.streams:
                case = measure(loaded, (num_streams, arguments.num_output_tokens), arguments.repeats)
                cases[f"{model} {form} {num_streams}"] = case
    report = {"what": "speculation", **environment("torch"), **vars(arguments)}
    publish({**report, "cases": cases})


def measure(loaded: Loaded, size: tuple[int, int], repeats: int) -> dict[str, float]:
    """``size`` is the number of streams, and of output tokens of each."""
    draft = loaded.runner.proposer
    plain = loaded._replace(config=replace(loaded.config, num_speculative_tokens=0))
    _, outputs = run(plain, size, Nothing())
    proposers: dict[str, Proposer] = {f"right {share:g}": MadeUp(outputs, share, draft) for share in RIGHT}
    if draft is None:
        proposers["nothing"] = Nothing()
    ratios: dict[str, list[float]] = {name: [] for name in proposers}
    rates = []
    for _ in range(repeats):
        for name, proposer in proposers.items():
            without, _ = run(plain, size, Nothing())
            seconds, again = run(loaded, size, proposer)
            assert again == outputs, "proposals changed the tokens"
            ratios[name].append(without / seconds)
            rates.append(size[0] * size[1] / without)
    medians = {name: round(statistics.median(values), 3) for name, values in ratios.items()}
    cost = {"cost": round(draft.costs[0].token, 3)} if draft else {}
    return {"tokens_per_s_without": round(statistics.median(rates), 1), **cost, **medians}


class Nothing(Proposer):
    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        return []


class MadeUp(Proposer):
    """Each token is right with probability ``share``, always the same ones. Proposing takes its time."""

    def __init__(self, outputs: list[list[int]], share: float, draft: Proposer | None) -> None:
        self._said = outputs
        self._share = share
        self._draft = draft
        self.costs = draft.costs if draft else Proposer.costs

    def begin(self, wanted: list[tuple[Sequence, int]]) -> None:
        if self._draft:
            self._draft.begin(wanted)

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int] | None:
        if self._draft:
            computed = self._draft.propose(sequence, max_tokens)
            if computed is None:
                return None
            max_tokens = len(computed)
        count = sequence.num_output_tokens
        known = enumerate(self._said[sequence.key[0]][count : count + max_tokens], count)
        rights = (random.Random(f"{sequence.key}/{place}").random() < self._share for place in range(count, 1 << 30))
        return [token if right else token ^ 1 for (_, token), right in zip(known, rights, strict=False)]


def run(loaded: Loaded, size: tuple[int, int], proposer: Proposer) -> tuple[float, list[list[int]]]:
    """Seconds from the first output token to the last, and the tokens."""
    tokens = random.Random(0)
    num_streams, num_output_tokens = size
    sequences = [random_sequence(i, NUM_PROMPT_TOKENS, num_output_tokens, tokens) for i in range(num_streams)]
    depth = int(loaded.runner.overlaps)
    engine = make_engine(loaded.runner, loaded.card, loaded.config, depth=depth, proposer=proposer)
    for sequence in sequences:
        engine.add(sequence)
    while not all(sequence.num_output_tokens for sequence in sequences):
        engine.step()
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start, [sequence.output_tokens.tolist() for sequence in sequences]


if __name__ == "__main__":
    main()
