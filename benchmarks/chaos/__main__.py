"""Chaos test: kills, stops and crashes of every process under many streams, checked by an oracle that knows every text.

``python benchmarks/chaos --seconds 1800 --model hash-lm`` (or ``demo``, with ``--dtype bfloat16 --backend native``). A
table goes to standard error, one JSON line to standard output; the exit code is 1 if anything was lost, doubled,
altered, wrongly blamed or leaked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.chaos.adapter_operator import Operator
from benchmarks.chaos.chaos_clients import Clients, HashOracle, Oracle, RecordedOracle
from benchmarks.chaos.faults import Faults
from benchmarks.chaos.service import Service, wait_for
from benchmarks.report import environment
from triptych import Client
from triptych.protocol.board import ROLES

QUIET_S = 60.0
MUST_BE_ZERO = (
    "lost", "altered", "innocents_failed", "adapters_refused", "poison_unnamed", "unrecovered", "unfinished", "busy",
    "pages_missing", "descriptors_leaked", "processes_left", "files_left", "drain_errors", "drain_exit_code",
)  # fmt: skip
SETTINGS = ["--max-num-seqs", "32", "--max-restarts", "1000000", "--degrade-after", "1000000", "--drain-timeout", "60"]


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="triptych-chaos-", dir="/dev/shm") as folder:
        run_dir = Path(folder) / "run"
        run_dir.mkdir(0o700)
        try:
            figures = wreak(arguments, run_dir)
        finally:
            if arguments.keep_log:
                Path(arguments.keep_log).write_bytes((Path(folder) / "serve.log").read_bytes())
    failures = {name: figures[name] for name in MUST_BE_ZERO if figures[name]}
    names = (
        "model", "dtype", "kv_dtype", "quantization", "backend", "streams", "seconds", "seed", "fork_workers",
        "num_speculative_tokens", "draft_model", "adapters",
    )  # fmt: skip
    config = {name: getattr(arguments, name) for name in names}
    report = {"what": "chaos", **environment("pyzmq", "torch"), "config": config, **figures, "failures": failures}
    print(table(figures, failures), file=sys.stderr)
    print(json.dumps(report))
    return 1 if failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--model", default="hash-lm")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--backend", default="transformers")
    parser.add_argument("--gap", type=float, default=1.0, help="seconds between two faults, on average")
    parser.add_argument("--poison", type=float, default=0.005, help="share of the requests")
    parser.add_argument("--only", default="", help="of the faults, those with this in their names")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-fork-workers", action="store_false", dest="fork_workers", help="start each anew")
    parser.add_argument("--num-speculative-tokens", type=int, help="with 15 --streams at most it guesses")
    parser.add_argument("--draft-model", help="as --num-speculative-tokens; of a --model with weights")
    parser.add_argument("--adapters", action="store_true", help="load and unload LoRA adapters all the time; hash-lm")
    parser.add_argument("--keep-log", help="a file for what the service logged")
    return parser.parse_args()


def flags(arguments: argparse.Namespace) -> list[str]:
    guesses = {"num-speculative-tokens": arguments.num_speculative_tokens, "draft-model": arguments.draft_model}
    given = [part for name, value in guesses.items() if value is not None for part in (f"--{name}", str(value))]
    return [*model_flags(arguments), *SETTINGS, *given, *([] if arguments.fork_workers else ["--no-fork-workers"])]


def model_flags(arguments: argparse.Namespace) -> list[str]:
    if arguments.model == "hash-lm":
        # A pool for a quarter of the wanted tokens, so there are always preemptions.
        return ["--model", "hash-lm", "--hash-step-ms", "2", "--num-pages", "400"]
    model = ["--model", arguments.model, "--dtype", arguments.dtype, "--backend", arguments.backend, "--threads", "1"]
    bits = ["--kv-dtype", arguments.kv_dtype, "--quantization", arguments.quantization]
    return [*model, *bits, "--recovery", "exact", "--num-pages", "2000"]


def wreak(arguments: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    service = Service(run_dir, flags(arguments))
    service.start()
    try:
        service.wait_ready()
        operator = Operator(service, run_dir.parent, seed=arguments.seed) if arguments.adapters else None
        oracle = make_oracle(arguments, run_dir, operator)
        files_before = service.num_files()
        streams = {"streams": arguments.streams, "seed": arguments.seed, "poison_share": arguments.poison}
        clients = Clients(run_dir, oracle, **streams)
        faults = Faults(service, clients.watch, seed=arguments.seed, gap_s=arguments.gap, only=arguments.only)
        began = time.monotonic()
        faults.run(arguments.seconds, clients.stopping)
        elapsed_s = time.monotonic() - began
        if operator is not None:
            operator.stop()
        unfinished = clients.stop(240.0)
        return {
            "elapsed_s": round(elapsed_s, 1),
            **requests_figures(clients),
            **faults_figures(faults),
            "adapters": dict(operator.counts) if operator is not None else {},
            "adapters_refused": operator.wrong if operator is not None else [],
            "unfinished": unfinished,
            **leaks(service, run_dir, files_before),
            **drain(service, run_dir, oracle),
        }
    finally:
        if service.process is not None and service.process.poll() is None:
            service.kill_driver()


def make_oracle(arguments: argparse.Namespace, run_dir: Path, operator: Operator | None) -> Oracle:
    if arguments.model == "hash-lm":
        return HashOracle(operator.loaded if operator is not None else ())
    with Client(run_dir) as client:
        return RecordedOracle(client, num_requests=60, seed=arguments.seed)


def requests_figures(clients: Clients) -> dict[str, Any]:
    counts, watch = clients.watch.counts, clients.watch
    names = (
        "whole", "embedded", "aborted", "handed_over", "vanished", "refused", "overloaded", "poison_named", "too_late",
        "tokens",
    )  # fmt: skip
    return {
        "requests": {name: counts[name] for name in names},
        "lost": counts["lost"],
        "altered": counts["altered"],
        "innocents_failed": counts["innocent_failed"],
        "poison_unnamed": counts["poison_unnamed"],
        "refusal_ms_p50": round(median(watch.refusal_ms), 1) if watch.refusal_ms else None,
        "examples": watch.wrong,
    }


def faults_figures(faults: Faults) -> dict[str, Any]:
    return {
        "faults": dict(faults.kinds),
        "kills": {**faults.kills, "all": sum(faults.kills.values())},
        "unrecovered": faults.unrecovered,
        "recovery_s": {name: spread(times) for name, times in sorted(faults.recovery_s.items())},
        "after_ready_s": {
            name: spread([a - b for a, b in zip(times, faults.ready_s[name], strict=True)])
            for name, times in sorted(faults.recovery_s.items())
        },
    }


def spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    last = len(ordered) - 1
    at = {"p50": last // 2, "p95": math.ceil(0.95 * last), "max": last}
    return {**{name: round(ordered[index], 3) for name, index in at.items()}, "n": len(ordered)}


def leaks(service: Service, run_dir: Path, files_before: dict[str, int]) -> dict[str, Any]:
    """Resources still held although no client is active."""
    with Client(run_dir) as client:
        with contextlib.suppress(TimeoutError):  # the reported figures say what is busy
            wait_for(lambda: not busy(client), QUIET_S, interval_s=0.1)
        stats = client.stats()
        left = busy(client)
    execute, files = stats["execute"], service.num_files()
    return {
        "busy": left,
        "pages_missing": execute["pages"] - execute["pages_free"] - execute["pages_cached"],
        "preemptions_in_last_life": execute["preemptions"],
        "descriptors_leaked": sum(max(0, files.get(role, 0) - files_before.get(role, 0) - 8) for role in ROLES),
        "descriptors": files,
    }


def busy(client: Client) -> dict[str, int]:
    stats = client.stats()
    names = {
        "prepare": ("waiting", "live", "records_used", "pending_bytes"),
        "execute": ("held", "waiting", "decoding", "pages_limbo", "pages_held", "pages_lost", "suspects"),
        "summarize": ("live", "unread"),
    }
    return {f"{role}.{name}": stats[role][name] for role in names for name in names[role] if stats[role].get(name)}


def drain(service: Service, run_dir: Path, oracle: Oracle) -> dict[str, Any]:
    """SIGTERM under load: every accepted request is answered, and nothing is left behind."""
    rng, errors = random.Random(5), 0
    pids = [*service.pids().values(), service.process.pid if service.process else 0]
    with Client(run_dir) as client:
        asked = [oracle.draw(rng) for _ in range(64)]
        streams = [(client.submit(**request, lease_s=60.0), expected) for request, expected in asked]
        for stream, _ in streams:
            stream.accepted(60.0)
        began = time.monotonic()
        code = service.terminate()
        for stream, expected in streams:
            errors += not stream.done or stream.result(1.0).token_ids != expected
    sockets = [path.name for path in run_dir.iterdir() if path.is_socket() or path.suffix in (".tmp", ".new")]
    left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    return {
        "drain_s": round(time.monotonic() - began, 2),
        "drain_exit_code": code,
        "drain_errors": errors,
        "processes_left": left,
        "files_left": sockets,
    }


def table(figures: dict[str, Any], failures: dict[str, Any]) -> str:
    rows = [(f"requests {name}", value) for name, value in figures["requests"].items()]
    rows += [(f"fault {name}", value) for name, value in figures["faults"].items()]
    rows += [(f"adapters {name}", value) for name, value in figures["adapters"].items()]
    rows += [("signals sent", figures["kills"])]
    rows += [(f"back after {name}, s", value) for name, value in figures["recovery_s"].items()]
    rows += [(name.replace("_", " "), figures[name]) for name in MUST_BE_ZERO]
    text = "\n".join(f"{name:<34} {value}" for name, value in rows)
    return f"{text}\n{'FAILED: ' + str(failures) + str(figures['examples']) if failures else 'all is well'}"


if __name__ == "__main__":
    sys.exit(main())
