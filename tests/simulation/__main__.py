"""``python -m tests.simulation``: run many seeds; ``--seed N``: run one of them and print its events."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.report import environment, publish
from tests.simulation.checks import Violation
from tests.simulation.kinds import KINDS
from tests.simulation.world import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one only, with its log")
    for name, kind in KINDS.items():
        text = f"{kind.what}; by default each seed says it"
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=text)
    parser.add_argument("--output", type=Path, help="a file for the figures, as one JSON line")
    arguments = parser.parse_args()
    kinds = {name: getattr(arguments, name) for name in KINDS}
    if arguments.seed is not None:
        show(arguments.seed, kinds)
    else:
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        sys.exit(run_many(seeds, arguments.output, kinds))


def show(seed: int, kinds: dict[str, bool | None]) -> None:
    world = World(seed, **kinds)
    try:
        world.run()
    except Violation as violation:
        sys.exit(str(violation))
    print("\n".join(world.log))


def run_many(seeds: range, output: Path | None, kinds: dict[str, bool | None]) -> int:
    """The exit code: 1 if a seed violated an invariant."""
    gc.freeze()  # exclude existing objects from later garbage collections
    started, failed, num_deaths, num_ends = time.perf_counter(), [], 0, 0
    num_drafted = 0
    num_runs: Counter[str] = Counter()  # by kind
    for seed in seeds:
        world = World(seed, **kinds)
        try:
            world.run()
        except Violation as violation:
            failed.append(seed)
            print(violation, file=sys.stderr)
        num_deaths += world.num_deaths
        num_ends += world.checks.num_ends
        num_drafted += world.plan.has_draft_model
        num_runs.update(name for name, is_on in world.kinds.items() if is_on)
    figures = {
        "what": "deterministic simulation",
        "seeds": [seeds.start, seeds.stop],
        **{f"with_{name}": num_runs[name] for name in KINDS},
        "with_draft_model": num_drafted,
        "deaths": num_deaths,
        "answered_requests": num_ends,
        "violations": failed,
        "seconds": round(time.perf_counter() - started, 1),
        **environment("numpy"),
    }
    publish(figures, output)
    return int(bool(failed))


if __name__ == "__main__":
    main()
