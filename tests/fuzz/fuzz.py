"""Feeds damaged bytes to every decoder: each input is refused with the documented error, in bounded time.

``python -m tests.fuzz.fuzz`` for a million inputs; ``test_fuzz.py`` does some thousands.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import environment
from tests.fuzz.mutate import mutate
from tests.fuzz.targets import Target, make_targets

MAX_INPUT_S = 1.0  # generous: on a busy machine, a millisecond's work may take much longer
MAX_GROWTH_KIB = 64 << 10


@dataclass
class Outcome:
    num_read: int = 0
    num_refused: int = 0
    slowest_ms: float = 0.0


class Escaped(AssertionError):
    """A decoder raised something else than a refusal."""


def fuzz(target: Target, name: str, *, seed: int, count: int) -> Outcome:
    rng, outcome = random.Random(f"{name} {seed}"), Outcome()
    for number in range(count):
        damaged = mutate(rng, rng.choice(target.sources))
        began = time.process_time()  # load of the machine is not the decoder's fault
        try:
            target.read(damaged)
            outcome.num_read += 1
        except target.refusals:
            outcome.num_refused += 1
        except UnicodeDecodeError as error:
            if name not in ("config", "card"):  # decoding is done by the callers
                raise Escaped(f"{name}, seed {seed}, input {number}: {damaged!r}") from error
            outcome.num_refused += 1
        except BaseException as error:
            raise Escaped(f"{name}, seed {seed}, input {number}: {damaged!r}") from error
        outcome.slowest_ms = max(outcome.slowest_ms, (time.process_time() - began) * 1e3)
    return outcome


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a file for the figures, as one JSON line")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets = make_targets(folder)
        before, began = peak_kib(), time.perf_counter()
        outcomes = {
            name: vars(fuzz(target, name, seed=arguments.seed, count=share(name, arguments.inputs, targets)))
            for name, target in targets.items()
        }
    figures = {
        "what": "fuzzing of every decoder",
        "inputs": sum(o["num_read"] + o["num_refused"] for o in outcomes.values()),
        "other_exceptions": 0,  # the first one ends it
        "targets": outcomes,
        "grown_kib": peak_kib() - before,
        "seconds": round(time.perf_counter() - began, 1),
        **environment("msgpack", "numpy"),
    }
    print(json.dumps(figures))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(figures) + "\n")


def share(name: str, inputs: int, targets: dict[str, Target]) -> int:
    """Half for public frames, the rest divided among the others."""
    return inputs // 2 if name == "public frames" else inputs // 2 // (len(targets) - 1)


if __name__ == "__main__":
    main()
