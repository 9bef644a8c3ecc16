"""One engine in its own environment: reads commands from stdin and answers on stdout, in JSON lines.

``python child.py ENGINE FORMAT MODEL_DIR THREADS``; a command is {"workload": ..., "run": ..., "requests_per_s": ...}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.workloads import Request, make_requests


def main() -> None:
    engine_name, form, folder, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print to stdout, which must not mix with answers
    engine = None
    try:
        start = time.perf_counter()
        module = importlib.import_module(f"benchmarks.peers.engines.{engine_name}")
        engine = module.Engine(form, Path(folder), int(threads))
        load_s = time.perf_counter() - start
        engine.offline(make_requests("W5", -1)[:2])  # pools grow, kernels are compiled
        answers.write(json.dumps({"load_s": round(load_s, 2), "version": engine.version}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(measured(engine, **json.loads(line))) + "\n")
    except Exception as error:
        answers.write(json.dumps(failure(error)) + "\n")
    finally:
        if engine is not None:
            engine.close()


def measured(engine: Any, **order: Any) -> dict[str, Any]:
    try:
        return measure(engine, **order)
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> dict[str, Any]:
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def measure(engine: Any, workload: str, run: int, requests_per_s: float) -> dict[str, Any]:
    """Tokens per second, or for W4 the latencies in ms."""
    requests = make_requests(workload, run, requests_per_s=requests_per_s)
    if workload == "W4":
        start = time.perf_counter()
        engine.online(requests)
        return {"seconds": time.perf_counter() - start, **latencies(requests)}
    seconds = timed(engine, requests)
    if workload == "W2":
        prefill_s = timed(engine, make_requests("W2 prefill", run))
        return {"seconds": seconds, "tokens_per_s": (requests[0].max_tokens - 1) / (seconds - prefill_s)}
    num_tokens = len(requests[0].prompt) if workload == "W3" else sum(request.max_tokens for request in requests)
    return {"seconds": seconds, "tokens_per_s": num_tokens / seconds}


def timed(engine: Any, requests: list[Request]) -> float:
    start = time.perf_counter()
    outputs = engine.offline(requests)
    seconds = time.perf_counter() - start
    for request, output in zip(requests, outputs, strict=True):
        if len(output) != request.max_tokens:
            raise RuntimeError(f"request {request.index} has {len(output)} tokens, wanted are {request.max_tokens}")
    return seconds


def latencies(requests: list[Request]) -> dict[str, float]:
    first = sorted(r.token_times_s[0] - r.arrival_s for r in requests)
    gaps = sorted(b - a for r in requests for a, b in zip(r.token_times_s, r.token_times_s[1:], strict=False))
    return {
        "ttft_p50_ms": 1e3 * first[len(first) // 2],
        "itl_p50_ms": 1e3 * gaps[len(gaps) // 2],
        "itl_p99_ms": 1e3 * gaps[int(0.99 * len(gaps))],
    }


if __name__ == "__main__":
    main()
