"""Ten thousand concurrent clients, a thousand that vanish, and one that does not read beside 63 that do.

The hash LM answers, so the pipeline is measured without a model. One JSON line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import environment, publish
from tests.pipeline.raw import ABORT, ACCEPTED, ACKNOWLEDGE, FINISHED, REJECTED, SUBMIT, RawClient
from triptych import Client, Driver

NUM_PROCESSES = 8  # that share the clients: a socket costs its process two descriptors
MAX_TOKENS = 4
LEASE_S = 3.0


def figures_of(driver: Driver) -> dict[str, dict[str, float]]:
    """Resident MiB and descriptors of each worker."""
    processes = {role: psutil.Process(pid) for role, pid in driver.pids.items() if pid is not None}
    return {
        role: {"rss_mib": round(p.memory_info().rss / 2**20, 1), "files": p.num_fds()} for role, p in processes.items()
    }


def crowd(run_dir: str, count: int, here: Any, go: Any, results: Any) -> None:
    """``count`` clients with two sockets each, all connected before the first request."""
    import zmq

    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * count + 10)
    clients = [RawClient(Path(run_dir), context=context) for _ in range(count)]
    here.release()
    go.wait()
    latencies, num_refused = [], 0
    began = time.monotonic()
    for number, client in enumerate(clients):
        client.send("submit", SUBMIT, f"{os.getpid()}-{number}", {"prompt_token_ids": [1, 2], "max_tokens": MAX_TOKENS})
    waiting = dict(enumerate(clients))
    while waiting and time.monotonic() - began < 300:
        for number, client in list(waiting.items()):
            outcome = advance(client, f"{os.getpid()}-{number}")
            if outcome is not None:
                del waiting[number]
                latencies.append(time.monotonic() - began)
                num_refused += outcome == "refused"
    results.put((len(waiting), num_refused, latencies))
    context.destroy(linger=0)


def advance(client: RawClient, request_id: str) -> str | None:
    """Receive what has arrived; returns how the request ended, or None while it runs. Retries if overloaded."""
    for frame in client.collect("submit", 0):
        if frame[0] == ACCEPTED:
            client.follow(request_id, 0, again=True)
        elif frame[0] == REJECTED and frame[5] == "overloaded":
            client.send("submit", SUBMIT, request_id, {"prompt_token_ids": [1, 2], "max_tokens": MAX_TOKENS})
        elif frame[0] == REJECTED:
            return "refused"
    for frame in client.collect("follow", 0):
        if frame[0] == FINISHED:
            client.send("follow", ACKNOWLEDGE, [request_id])
            return "finished"
    return None


def ten_thousand(count: int) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    here, go, results = spawn.Semaphore(0), spawn.Event(), spawn.Queue()
    with Driver("hash-lm", lease_s=300.0, max_queue=4096, max_records=8192) as driver:
        before = figures_of(driver)
        arguments = (str(driver.run_dir), count // NUM_PROCESSES, here, go, results)
        processes = [spawn.Process(target=crowd, args=arguments) for _ in range(NUM_PROCESSES)]
        for process in processes:
            process.start()
        for _ in processes:
            here.acquire()
        wait_for_connections(driver, count)
        after = figures_of(driver)
        began = time.monotonic()
        go.set()
        outcomes = [results.get() for _ in processes]
        elapsed_s = time.monotonic() - began
        for process in processes:
            process.join()
        lost = driver.stats()["restarts"]
    latencies = sorted(latency for _, _, part in outcomes for latency in part)
    return {
        "clients": count,
        "answered": len(latencies) - sum(refused for _, refused, _ in outcomes),
        "unanswered": sum(waiting for waiting, _, _ in outcomes),
        "refused": sum(refused for _, refused, _ in outcomes),
        "seconds": round(elapsed_s, 1),
        "latency_p50_s": round(statistics.median(latencies), 2),
        "latency_max_s": round(latencies[-1], 2),
        "restarts": lost,
        "before": before,
        "with_all_connected": after,
    }


def wait_for_connections(driver: Driver, count: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        figures = figures_of(driver)
        if min(figures["prepare"]["files"], figures["summarize"]["files"]) >= count:
            return
        time.sleep(0.1)


def vanishing(count: int) -> dict[str, Any]:
    """Clients that disconnect as soon as they are accepted: the time until all their resources are freed."""
    with Driver(
        "hash-lm", lease_s=LEASE_S, hash_step_ms=5.0, max_queue=4096, max_client_requests=4096, max_num_seqs=64
    ) as driver:
        free = driver.stats()["execute"]["pages"]
        with RawClient(driver.run_dir) as client:
            for number in range(count):
                client.send("submit", SUBMIT, f"gone-{number}", {"prompt_token_ids": [1] * 20, "max_tokens": 500})
            outcomes = [client.receive("submit", ACCEPTED, REJECTED)[0] for _ in range(count)]
            while driver.stats()["prepare"]["records_used"] < outcomes.count(ACCEPTED):
                time.sleep(0.01)
        gone = time.monotonic()
        while not is_empty(driver, free) and time.monotonic() - gone < 60:
            time.sleep(0.01)
        return {
            "vanished": outcomes.count(ACCEPTED),
            "lease_s": LEASE_S,
            "all_pages_back_after_s": round(time.monotonic() - gone, 2),
            "leaked": 0 if is_empty(driver, free) else driver.stats()["execute"],
        }


def is_empty(driver: Driver, num_pages: int) -> bool:
    stats = driver.stats()
    execute, prepare = stats["execute"], stats["prepare"]
    nobody_waits = execute["held"] == prepare["live"] == prepare["waiting"] == 0
    return bool(nobody_waits and execute["pages_free"] + execute["pages_cached"] == num_pages)


def fast_rate(driver: Driver, seconds: float, *, count: int) -> float:
    """Tokens per second of ``count`` clients that read everything. Tokens count as they arrive: with whole answers, a
    rate could only be a multiple of one answer for each client.
    """
    totals = [0] * count
    until = time.monotonic() + seconds

    def ask(index: int) -> None:
        with Client(driver.run_dir) as client:
            while True:
                stream = client.submit([index + 1], max_tokens=100)
                for delta in stream:
                    if time.monotonic() >= until:
                        stream.abort()
                        return
                    totals[index] += len(delta.token_ids)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(totals) / seconds


def stalled(seconds: float, repeats: int) -> dict[str, Any]:
    """Rounds with and without a client that does not read, in turn, so that other load affects both."""
    options: dict[str, Any] = {"lease_s": 600.0, "hash_step_ms": 20.0, "max_num_seqs": 64}
    alone, beside, growth = [], [], []
    with Driver("hash-lm", **options) as driver:
        fast_rate(driver, 2.0, count=63)
        for number in range(repeats):
            alone.append(fast_rate(driver, seconds, count=63))
            with RawClient(driver.run_dir, receive_limit=1) as reader:
                request_id = reader.submit(f"stalled-{number}", prompt_token_ids=[1, 2], max_tokens=3000)
                before = figures_of(driver)["summarize"]["rss_mib"]
                beside.append(fast_rate(driver, seconds, count=63))
                growth.append(figures_of(driver)["summarize"]["rss_mib"] - before)
                reader.send("follow", ABORT, request_id)
                while driver.client.status(request_id).is_live:
                    time.sleep(0.01)
    return {
        "fast_clients": 63,
        "tokens_per_second_alone": [round(rate) for rate in alone],
        "tokens_per_second_beside_one_that_stalls": [round(rate) for rate in beside],
        "ratio_of_medians": round(statistics.median(beside) / statistics.median(alone), 4),
        "summarize_grew_mib": growth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--vanishing", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"what": "many clients, vanishing clients, a stalled client"}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "at_once": lambda: ten_thousand(arguments.clients),
        "vanishing": lambda: vanishing(arguments.vanishing),
        "stalled": lambda: stalled(arguments.seconds, arguments.repeats),
    }
    for name, measure in parts.items():
        figures[name] = measure()
        print(f"{name}: {figures[name]}", file=sys.stderr)
    figures |= environment("pyzmq", "numpy")
    publish(figures, arguments.output)


if __name__ == "__main__":
    main()
