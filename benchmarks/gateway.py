"""How much does HTTP add to the time between tokens? Prints one JSON line.

256 concurrent streams on the hash model, with a simulated step time: read by a ZeroMQ client, and as server-sent events
through a gateway process, in turns. Both readers use asyncio and record when each token arrived. A stall is the longest
gap of any stream. Then the same streams as fast as the machine can: how many tokens per second go through one gateway,
and the smallest share of them that any stream had until the first stream ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import environment, publish
from triptych import AsyncClient, Driver
from triptych.launch.gateway.config import GatewayConfig
from triptych.launch.gateway.serving.processes import gateways, listening_for

STREAMS, OUTPUT_TOKENS, TURNS, STEP_MS = 256, 60, 3, 30.0
FLOOD_TOKENS = 1000
NUM_TOKENS = re.compile(rb"^id: (\d+)$", re.MULTILINE)
OPTIONS: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--step-ms", type=float, default=STEP_MS)
    parser.add_argument("--stream-interval", type=int, default=1)
    asked = parser.parse_args()
    with site(asked.step_ms, asked.streams, asked.stream_interval) as (driver, url):
        turns = [run_turn(driver, url, asked.streams, turn) for turn in range(1, asked.turns + 1)]
    results = summarise([times for times, _ in turns])
    num_tokens = asked.streams * OUTPUT_TOKENS
    for name in turns[0][1]:
        results[f"{name}_cpu_us_per_token"] = round(statistics.median(used[name] for _, used in turns) / num_tokens, 1)
    with site(0.0, asked.streams, asked.stream_interval) as (_, url):
        results["flooded"] = flood(url, asked.streams)
    about = environment("fastapi", "uvicorn", "uvloop", "httptools", "pyzmq")
    setting = {"streams": asked.streams, "tokens": OUTPUT_TOKENS, "step_ms": asked.step_ms, "turns": asked.turns,
               "stream_interval": asked.stream_interval}  # fmt: skip
    publish({"what": "gateway", **about, **setting, "results": results})


@contextmanager
def site(step_ms: float, streams: int, stream_interval: int) -> Iterator[tuple[Driver, str]]:
    """A pipeline, and the URL of its gateway."""
    config = GatewayConfig(http=":0", stream_interval=stream_interval, resume_s=1.0)
    limits: dict[str, Any] = {"max_num_seqs": streams, "num_pages": 64 * streams, "max_queue": 2 * streams}
    with (
        Driver("hash-lm", hash_step_ms=step_ms, max_client_requests=2 * streams, **limits) as driver,
        listening_for(config) as listener,
        gateways(config, listener, driver.run_dir, log_level="error") as url,
    ):
        assert url is not None
        asyncio.run(over_http(url, 4, 0))  # warm-up
        yield driver, url


def cpu_us(driver: Driver) -> dict[str, float]:
    """Processor time used by the two processes that a token passes on its way from execute to an HTTP client."""
    children = psutil.Process().children()
    [gateway] = [child for child in children if "triptych.launch.gateway" in child.cmdline()]
    processes = {"summarize": psutil.Process(driver.pids["summarize"]), "gateway": gateway}
    return {name: 1e6 * sum(process.cpu_times()[:2]) for name, process in processes.items()}


def run_turn(
    driver: Driver, url: str, num_streams: int, turn: int
) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """Arrival times of each stream's tokens, by transport, and processor time in us of that over HTTP. The prompts of a
    turn are not in the prefix cache.
    """
    by_zeromq = asyncio.run(over_zeromq(driver, num_streams, 2 * turn))
    before = cpu_us(driver)
    by_http = asyncio.run(over_http(url, num_streams, 2 * turn + 1))
    used = {name: us - before[name] for name, us in cpu_us(driver).items()}
    return {"zeromq": by_zeromq, "http": by_http}, used


def flood(url: str, num_streams: int) -> dict[str, float]:
    """What goes through while all streams run."""
    times = asyncio.run(over_http(url, num_streams, 1, num_tokens=FLOOD_TOKENS))
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    counts = [sum(begin < time <= end for time in each) for each in times]
    return {
        "tokens_per_s": round(sum(counts) / (end - begin)),
        "least_share": round(min(counts) * num_streams / sum(counts), 2),  # 1: all have the same
    }


def prompt(stream: int, turn: int) -> list[int]:
    return [int(token) for token in np.random.default_rng([stream, turn]).integers(10, 250, 16)]


async def over_zeromq(driver: Driver, num_streams: int, turn: int) -> list[list[float]]:
    async with AsyncClient(driver.run_dir) as client:

        async def read(number: int) -> list[float]:
            times: list[float] = []
            stream = client.submit(prompt(number, turn), **OPTIONS)
            while deltas := await stream.take():
                times += [time.perf_counter()] * sum(len(delta.token_ids) for delta in deltas)
            return times

        return await asyncio.gather(*(read(number) for number in range(num_streams)))


async def over_http(url: str, num_streams: int, turn: int, *, num_tokens: int = OUTPUT_TOKENS) -> list[list[float]]:
    """Plain sockets: a real client's parser costs more than the gateway, on the same cores."""
    host, port = url.removeprefix("http://").split(":")

    async def read(number: int) -> list[float]:
        reader, writer = await asyncio.open_connection(host, int(port))
        options = {**OPTIONS, "max_tokens": num_tokens}
        wanted = {"prompt": prompt(number, turn), "stream": True, "resumable": True, **options}
        body = json.dumps(wanted)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
        times: list[float] = []
        text = b""
        while chunk := await reader.read(1 << 16):
            *events, text = (text + chunk).split(b"\n\n")
            now = time.perf_counter()
            for event in events:
                if found := NUM_TOKENS.search(event):  # the id of an event is the number of tokens so far
                    times += [now] * (int(found[1]) - len(times))
        writer.close()
        return times

    return await asyncio.gather(*(read(number) for number in range(num_streams)))


def summarise(turns: list[dict[str, list[list[float]]]]) -> dict[str, Any]:
    medians: dict[str, list[float]] = {"zeromq": [], "http": []}
    report: dict[str, Any] = {}
    for way, of_turns in medians.items():
        gaps = [np.concatenate([np.diff(times) for times in turn[way]]) * 1e3 for turn in turns]
        assert all(len(times) == OUTPUT_TOKENS for turn in turns for times in turn[way]), "a stream has too few tokens"
        of_turns += [float(np.median(each)) for each in gaps]
        whole = np.concatenate(gaps)
        stalls = [max(float(np.diff(times).max()) * 1e3 for times in turn[way]) for turn in turns]
        report[way] = {
            "itl_p50_ms": statistics.median(of_turns),
            "itl_p99_ms": float(np.percentile(whole, 99)),
            "longest_gap_ms": max(stalls),
        }
    report["added_itl_p50_ms"] = statistics.median(
        b - a for a, b in zip(medians["zeromq"], medians["http"], strict=True)
    )
    return report


if __name__ == "__main__":
    main()
