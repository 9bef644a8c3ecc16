"""``python -m tests.simulation``: run many seeds; ``--seed N``: run one of them and print its events."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path

from benchmarks.report import environment
from tests.simulation.checks import Violation
from tests.simulation.world import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one only, with its log")
    parser.add_argument(
        "--overlaps", action=argparse.BooleanOptionalAction, help="whether steps do; by default each seed says it"
    )
    parser.add_argument(
        "--groups", action=argparse.BooleanOptionalAction, help="whether some requests have several sequences; likewise"
    )
    parser.add_argument(
        "--proposals", action=argparse.BooleanOptionalAction, help="whether tokens are guessed; likewise"
    )
    parser.add_argument(
        "--adapters", action=argparse.BooleanOptionalAction, help="whether some requests ask for one; likewise"
    )
    parser.add_argument("--owners", action=argparse.BooleanOptionalAction, help="whether clients have keys; likewise")
    parser.add_argument(
        "--loading", action=argparse.BooleanOptionalAction, help="whether adapters come and go; likewise"
    )
    parser.add_argument(
        "--states", action=argparse.BooleanOptionalAction, help="whether the model has recurrent layers; likewise"
    )
    parser.add_argument(
        "--scores", action=argparse.BooleanOptionalAction, help="whether requests ask for logprobs; likewise"
    )
    parser.add_argument(
        "--embeddings", action=argparse.BooleanOptionalAction, help="whether some requests ask for one; likewise"
    )
    parser.add_argument("--output", type=Path, help="a file for the figures, as one JSON line")
    arguments = parser.parse_args()
    names = ("overlaps", "groups", "proposals", "adapters", "owners", "loading", "states", "scores", "embeddings")
    kinds = {name: getattr(arguments, name) for name in names}
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
    num_overlapped = num_grouped = num_guessed = num_drafted = num_adapted = num_owned = num_loading = num_recurrent = 0
    num_scored = num_embedding = 0
    for seed in seeds:
        world = World(seed, **kinds)
        try:
            world.run()
        except Violation as violation:
            failed.append(seed)
            print(violation, file=sys.stderr)
        num_deaths += world.num_deaths
        num_ends += world.checks.num_ends
        num_overlapped += world.plan.overlaps
        num_grouped += world.has_groups
        num_guessed += world.has_proposals
        num_drafted += world.plan.has_draft_model
        num_adapted += world.has_adapters
        num_owned += world.has_owners
        num_loading += world.is_loading
        num_recurrent += world.has_states
        num_scored += world.has_scores
        num_embedding += world.has_embeddings
    figures = {
        "what": "deterministic simulation",
        "seeds": [seeds.start, seeds.stop],
        "with_overlap": num_overlapped,
        "with_groups": num_grouped,
        "with_proposals": num_guessed,
        "with_draft_model": num_drafted,
        "with_adapters": num_adapted,
        "with_owners": num_owned,
        "with_loading": num_loading,
        "with_states": num_recurrent,
        "with_logprobs": num_scored,
        "with_embeddings": num_embedding,
        "deaths": num_deaths,
        "answered_requests": num_ends,
        "violations": failed,
        "seconds": round(time.perf_counter() - started, 1),
        **environment("numpy"),
    }
    print(json.dumps(figures))
    if output is not None:
        output.write_text(json.dumps(figures) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    main()
