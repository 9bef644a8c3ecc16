"""Triptych and the installed peers: the same checkpoints, the same requests, in turns, in one run.

``python benchmarks/peers --peers DIR`` (or ``TRIPTYCH_PEERS=DIR``); README.md describes DIR. Memory and clock rates of
a machine drift, so only runs in turns are compared. In a turn, an engine is loaded, alone in memory, runs all workloads
and is stopped; each round of turns starts with another engine. Short runs are repeated, as are those during which other
processes used more than 10 % of the machine. Tables go to standard error, one JSON line to standard output.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cpu_models import SHAPES, make_model
from benchmarks.peers.contestants import Contestant, Running, find_contestants, turns
from benchmarks.peers.limits import Limits
from benchmarks.peers.load import Meter
from benchmarks.peers.results import Results, draw, table
from benchmarks.peers.workloads import WORKLOADS, make_requests
from benchmarks.report import environment, publish

FORMS = ("bf16", "int8", "int4", "transformers")
MODELS = ("smollm2-135m", "qwen3-0.6b")
LOAD = 0.6  # of W4: arrival rate, relative to the best bf16 rate of the other engines in W1 of the same run
REQUESTS_PER_S = {"smollm2-135m": 3.5, "qwen3-0.6b": 1.0}  # if W1 or the other engines are left out
MOST_FOREIGN, MOST_RUNS = 0.1, 4
LEAST_S = 2.0  # per turn: a run of half a second is not twice as good or bad as another because of one hiccup


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine is left running
    report: dict[str, Any] = {"what": "peers", **environment("torch", "transformers"), "repeats": arguments.repeats}
    report["threads"], report["models"] = arguments.threads, {}
    for name in arguments.models:
        results = compare(name, arguments)
        report["models"][name] = results.to_json()
        print(table(name, results), file=sys.stderr)
        if arguments.plot:
            draw(arguments.plot.with_stem(f"{arguments.plot.stem}-{name}"), name, results)
    publish(report, arguments.output)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.environ.get("TRIPTYCH_PEERS")
    parser.add_argument("--peers", type=Path, default=Path(folder) if folder else None, help="see README.md")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--forms", nargs="*", default=["bf16", "int8"], choices=FORMS)
    parser.add_argument("--only", nargs="*", help="these engines, such as 'triptych bf16' or vllm")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=90.0, help="no further run of one engine and workload after")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--plot", type=Path, help="a picture for each model, the model's name is added")
    parser.add_argument("--output", type=Path, help="a file for the JSON line")
    return parser.parse_args()


def compare(name: str, arguments: argparse.Namespace) -> Results:
    model = arguments.peers / "models" / name if arguments.peers else None
    if model is None or not model.is_dir():
        model = make_model(name)
    results = Results(SHAPES[name])
    contestants = taking_part(model, arguments, results)
    arrivals = [each for each in arguments.workloads if each == "W4"]
    rates = [each for each in arguments.workloads if each != "W4"]
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(Path(folder), arguments.threads)
        for workloads in filter(None, (rates, arrivals)):
            if workloads is arrivals:
                results.requests_per_s = arrival_rate(results) or REQUESTS_PER_S[name]
            for run, contestant in turns(contestants, arguments.repeats):
                if wanted := still_wanted(contestant, workloads, arguments.budget_s, results):
                    results.limits.append(limits.measure())
                    take_turn(contestant, model, wanted, run, arguments.threads, results)
    return results


def taking_part(model: Path, arguments: argparse.Namespace, results: Results) -> list[Contestant]:
    """The contestants that are wanted and installed, ours first."""
    found = [each for each in find_contestants(arguments.peers, model, arguments.forms)
             if not arguments.only or {each.name, each.engine} & set(arguments.only)]  # fmt: skip
    for each in found:
        if each.why_not is not None:
            skip(each, each.why_not, results)
    return [each for each in found if each.why_not is None]


def skip(contestant: Contestant, why: str, results: Results) -> None:
    results.skipped[contestant.name] = why
    print_line(f"without {contestant.name}: {why}")


def still_wanted(contestant: Contestant, workloads: list[str], budget_s: float, results: Results) -> list[str]:
    """Those whose time is not used up; none of an engine that could not be loaded."""
    if contestant.name in results.skipped:
        return []
    return [each for each in workloads if results.spent_s(contestant.name, each) < budget_s]


def take_turn(
    contestant: Contestant, model: Path, workloads: list[str], run: int, threads: int, results: Results
) -> None:
    """Load the engine, let it run ``workloads``, and stop it."""
    log = Path(tempfile.gettempdir()) / f"triptych-peers-{contestant.engine}-{contestant.form}.log"
    with Running(contestant, model, threads, log) as running:
        facts = running.load()
        if "error" in facts:
            skip(contestant, f"{facts['error']}, see {log}", results)
            return
        results.facts.setdefault(contestant.name, facts)
        for workload in workloads:
            measure(running, workload, run, results)


def arrival_rate(results: Results) -> float | None:
    """Requests per second of W4, from this run's W1; None if there is none."""
    tokens_per_s = results.best_peer("bf16", "W1")
    if tokens_per_s is None:
        return None
    requests = make_requests("W1", 0)
    return round(LOAD * tokens_per_s * len(requests) / sum(request.max_tokens for request in requests), 2)


def measure(running: Running, workload: str, run: int, results: Results) -> None:
    """Undisturbed runs of ``LEAST_S`` in all, or the last of several attempts; each with the share of the others."""
    name, spent_s = running.contestant.name, 0.0
    for attempt in range(MOST_RUNS):
        with Meter() as meter:
            answer = running.run(workload, 1000 * attempt + run, results.requests_per_s)
        is_last = "error" in answer or (attempt == MOST_RUNS - 1 and not spent_s)
        if meter.foreign <= MOST_FOREIGN or is_last:
            spent_s += answer.get("seconds", 0.0)
            results.add(name, workload, {**answer, "foreign": round(meter.foreign, 3)})
            show(workload, name, answer, meter.foreign)
        if is_last or spent_s >= LEAST_S:
            return


def show(workload: str, name: str, answer: dict[str, Any], foreign: float) -> None:
    shown = {key: round(value, 1) for key, value in answer.items() if isinstance(value, float) and key != "seconds"}
    print_line(f"{time.strftime('%H:%M:%S')} {workload} {name}: {answer.get('error') or shown}, others {foreign:.0%}")


def print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
