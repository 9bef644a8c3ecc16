"""Many requests through one pipeline: the resident memory of each process must stay flat.

Compares the last quarter of the samples with the second one, when caches are as full as they get. Prints one JSON line;
the exit code is 1 if a process grew by 2 % or more. The clients are a separate process, whose memory is reported but
not checked.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import environment
from triptych import Client, Driver
from triptych.driver.stream import Stream

LIMIT = 0.02
SAMPLE_S = 0.5
IN_FLIGHT = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drive", type=Path, help="be the clients of the pipeline in this run directory")
    arguments = parser.parse_args()
    if arguments.drive:
        drive(arguments.drive, arguments.requests, random.Random(arguments.seed))
        return 0
    with Driver("hash-lm", num_pages=2000, lease_s=30.0) as driver:
        options = ["--requests", str(arguments.requests), "--seed", str(arguments.seed)]
        began = time.monotonic()
        with subprocess.Popen([sys.executable, __file__, "--drive", driver.run_dir, *options]) as clients:
            sampler = Sampler(driver, clients.pid)
            clients.wait()
            growth = sampler.stop()
        elapsed_s = time.monotonic() - began
        assert clients.returncode == 0, "the clients failed"
        restarts = sum(driver.stats()["restarts"].values())
    failures = {role: f for role, f in growth.items() if role != "clients" and f["growth"] >= LIMIT}
    config = {"requests": arguments.requests, "in_flight": IN_FLIGHT, "seed": arguments.seed}
    report = {"what": "soak", **environment("pyzmq"), "config": config, "elapsed_s": round(elapsed_s, 1)}
    print(json.dumps({**report, "rss": growth, "restarts": restarts, "failures": failures}))
    return 1 if failures or restarts else 0


def drive(run_dir: Path, num_requests: int, rng: random.Random) -> None:
    """Requests of all lengths, some of them aborted, from clients that come and go."""
    done = 0
    while done < num_requests:
        with Client(run_dir) as client:
            count = min(2000, num_requests - done)
            streams: deque[Stream] = deque()
            for _ in range(count):
                prompt = [rng.randrange(1, 250) for _ in range(rng.randrange(1, 100))]
                streams.append(client.submit(prompt, max_tokens=rng.randrange(1, 40)))
                if rng.random() < 0.1:
                    streams[-1].abort()
                if len(streams) >= IN_FLIGHT:
                    streams.popleft().result(60)
            while streams:
                streams.popleft().result(60)
            done += count


class Sampler:
    """Samples the memory of the workers, of this process with the driver, and of the clients."""

    def __init__(self, driver: Driver, clients: int) -> None:
        self._processes = {role: psutil.Process(pid) for role, pid in driver.pids.items() if pid}
        self._processes["driver"], self._processes["clients"] = psutil.Process(), psutil.Process(clients)
        self._samples: dict[str, list[int]] = {role: [] for role in self._processes}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(SAMPLE_S):
            for role, process in self._processes.items():
                with suppress(psutil.NoSuchProcess):  # the clients have finished
                    self._samples[role].append(_own_bytes(process))

    def stop(self) -> dict[str, dict[str, float]]:
        self._stopping.set()
        self._thread.join()
        return {role: _growth(samples) for role, samples in self._samples.items()}


def _own_bytes(process: psutil.Process) -> int:
    """Resident bytes without shared memory: the journal is mapped into every process, and filled once."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def _growth(samples: list[int]) -> dict[str, float]:
    quarter = len(samples) // 4
    second, last = median(samples[quarter : 2 * quarter]), median(samples[-quarter:])
    return {"mib": round(last / 2**20, 1), "growth": round(last / second - 1, 4), "samples": len(samples)}


if __name__ == "__main__":
    sys.exit(main())
