"""Over HTTP: ``triptych serve`` and vLLM's server with the same model, in turns, read by the same client.

``python benchmarks/peers/servers.py --peers DIR``; README.md describes DIR. Streams of /v1/completions with 128 tokens
in and 128 out, 1, 8 or 32 at once. Gaps are between events, of which a server may send fewer than tokens. ``front`` is
the processor time of all processes that neither schedule nor compute: vLLM's API server; our driver, prepare, summarize
and gateway. One JSON line on standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.contestants import OURS, Contestant, environment_of, find_contestants, turns
from benchmarks.peers.load import Meter, share_priority
from benchmarks.peers.workloads import END_ID, FIRST_ID
from benchmarks.report import environment, publish

STREAMS, NUM_PROMPT, NUM_OUTPUT = (1, 8, 32), 128, 128
LIMITS = ["--max-model-len", "2048", "--max-num-seqs", "64"]
COMPUTES = re.compile(r"triptych\.workers\.execute|VLLM::")  # in the command of what schedules and computes
LOADING_S = 900.0
EVENT = re.compile(rb"^data: (\{.*)", re.MULTILINE)


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left running
    contestants = [each for each in find_contestants(arguments.peers, arguments.model, ["bf16"])
                   if each.engine in (OURS, "vllm") and each.form == "bf16"]  # fmt: skip
    if missing := [each.why_not for each in contestants if each.why_not]:
        sys.exit(f"servers: {missing[0]}")
    report: dict[str, Any] = {"what": "peers-http", **environment("fastapi", "uvicorn", "uvloop")}
    runs: dict[str, list[dict[int, dict[str, float]]]] = {each.engine: [] for each in contestants}
    for run, contestant in turns(contestants, arguments.repeats):
        with Server(contestant, arguments.model, arguments.threads) as server:
            server.load()
            report["versions"][server.name] = server.version()
            runs[contestant.engine].append(measure(server, run))
    report |= {"repeats": arguments.repeats, "model": arguments.model.name}
    report |= {"prompt_tokens": NUM_PROMPT, "output_tokens": NUM_OUTPUT}
    report["results"] = {name: summarise(of_name) for name, of_name in runs.items()}
    publish(report, arguments.output)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.environ.get("TRIPTYCH_PEERS")
    parser.add_argument("--peers", type=Path, default=folder, required=folder is None, help="see README.md")
    parser.add_argument("--model", default="smollm2-135m", help="a folder in DIR/models")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="a file for the JSON line")
    arguments = parser.parse_args()
    arguments.peers = Path(arguments.peers)
    arguments.model = arguments.peers / "models" / arguments.model
    return arguments


class Server:
    """A server in a process of its own, with the model loaded once ``load`` returns."""

    def __init__(self, contestant: Contestant, model: Path, threads: int) -> None:
        self.name = contestant.engine
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        if self.name == OURS:
            command = ["-m", "triptych", "serve", "--http", f"127.0.0.1:{self.port}", "--dtype", "bfloat16",
                       "--threads", str(threads), "--max-kv-bytes", str(2 << 30)]  # fmt: skip
        else:
            command = ["-m", "vllm.entrypoints.openai.api_server", "--port", str(self.port), "--dtype", "bfloat16",
                       "--disable-uvicorn-access-log"]  # fmt: skip
        self._log = Path(tempfile.gettempdir()) / f"triptych-peers-http-{self.name}.log"
        command = [str(contestant.python), *command, "--model", str(model), "--served-model-name", "model", *LIMITS]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **environment_of(contestant, threads)}
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def load(self) -> None:
        deadline = time.monotonic() + LOADING_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"servers: {self.name} does not answer, see {self._log}")
            time.sleep(0.5)
        asyncio.run(drive(self.port, 8, Random("warm-up")))
        share_priority(self._process.pid)

    def version(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/version", timeout=5) as reply:
            return str(json.load(reply)["version"])

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def cpu_s(self) -> tuple[float, float]:
        """Processor time of all its processes, and of those that neither schedule nor compute."""
        root = psutil.Process(self._process.pid)
        whole_s = front_s = 0.0
        for process in [root, *root.children(recursive=True)]:
            used_s = sum(process.cpu_times()[:2])
            whole_s += used_s
            front_s += 0.0 if COMPUTES.search(" ".join(process.cmdline())) else used_s
        return whole_s, front_s


def measure(server: Server, run: int) -> dict[int, dict[str, float]]:
    """The server's figures by the number of streams."""
    results: dict[int, dict[str, float]] = {}
    for streams in STREAMS:
        before = server.cpu_s()
        with Meter() as meter:
            figures = asyncio.run(drive(server.port, streams, Random(f"{run}/{streams}")))
        cpu_s, front_s = (after - begun for after, begun in zip(server.cpu_s(), before, strict=True))
        figures["cpu_ms_per_token"] = 1e3 * cpu_s / (streams * NUM_OUTPUT)
        figures["front_us_per_token"] = 1e6 * front_s / (streams * NUM_OUTPUT)
        results[streams] = {**figures, "foreign": meter.foreign}
        print(server.name, streams, {k: round(v, 2) for k, v in figures.items()}, f"{meter.foreign:.0%}",
              file=sys.stderr, flush=True)  # fmt: skip
    return results


async def drive(port: int, streams: int, random: Random) -> dict[str, float]:
    """Latencies in ms and tokens per second of ``streams`` answers at once."""
    prompts = [[random.randrange(FIRST_ID, END_ID) for _ in range(NUM_PROMPT)] for _ in range(streams)]
    start = time.perf_counter()
    times = await asyncio.gather(*(read(port, prompt) for prompt in prompts))
    seconds = time.perf_counter() - start
    gaps = sorted(1e3 * (b - a) for each in times for a, b in pairwise(each))
    return {
        "tokens_per_s": streams * NUM_OUTPUT / seconds,
        "ttft_p50_ms": 1e3 * statistics.median(each[0] - start for each in times),
        "gap_p50_ms": gaps[len(gaps) // 2],
        "gap_p99_ms": gaps[int(0.99 * len(gaps))],
        "events_per_token": sum(map(len, times)) / (streams * NUM_OUTPUT),
    }


async def read(port: int, prompt: list[int]) -> list[float]:
    """When each event with text arrived. A plain socket: a real client's parser takes more than the servers do.

    Raises:
        RuntimeError: the answer does not have all its tokens.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({
        "model": "model", "prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    })  # fmt: skip
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    times: list[float] = []
    last: dict[str, Any] = {}
    rest = b""
    while chunk := await reader.read(1 << 16):
        *events, rest = (rest + chunk).split(b"\n\n")
        now = time.perf_counter()
        for event in events:
            if found := EVENT.search(event):
                last = json.loads(found[1]) if b'"usage":{' in event else last
                times += [now] * (b'"choices":[{' in event)
    writer.close()
    if (last.get("usage") or {}).get("completion_tokens") != NUM_OUTPUT:
        raise RuntimeError(f"an answer ended with {last or rest!r:.300}")
    return times


def summarise(runs: list[dict[int, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The median of each figure, and the most that other processes took."""
    found = {}
    for streams in STREAMS:
        rows = [run[streams] for run in runs]
        found[str(streams)] = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
        found[str(streams)]["foreign"] = round(max(row["foreign"] for row in rows), 3)
    return found


if __name__ == "__main__":
    main()
