"""The pipeline on a GPU while each of its processes is killed: are all answers those of an undisturbed run?"""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.setting import Notes, Setting, require
from triptych.protocol.config import PipelineConfig

if TYPE_CHECKING:
    from triptych import Driver


def recovery(setting: Setting, note: Notes) -> None:
    """0.6B with ``--deterministic``; ``pause_s`` is the longest time that a stream stood still."""
    require("zmq", "msgpack")
    from triptych import Driver  # here, because it needs both

    config = PipelineConfig.from_options(
        model=str(setting.checkpoint("qwen3-0.6b")),
        device=setting.device.type,
        backend="transformers" if setting.is_dry else "fused",
        deterministic=not setting.is_dry,
        max_model_len=setting.size(2048, 128),
        num_pages=setting.size(4096, 64),
    )
    requests = make_requests(setting)
    with Driver(config=config) as driver:
        expected = [driver.generate(**request).token_ids for request in requests[:1]]  # alone
        expected += [answer.token_ids for answer in driver.generate_all(requests[1:])]
        is_exact = True
        for role in ("execute", "summarize", "prepare"):
            answers, pause_s = answers_after_kill(driver, role, requests)
            num_equal = sum(a == b for a, b in zip(answers, expected, strict=True))
            is_exact = is_exact and num_equal == len(requests)
            startup_s = driver.stats().get(role, {}).get("startup_s")  # of the process that took over
            note(role, {"requests": len(requests), "equal": num_equal, "pause_s": pause_s, "startup_s": startup_s})
        note("is_exact", is_exact)


def make_requests(setting: Setting) -> list[dict[str, Any]]:
    """Half of them greedy, half of them drawn."""
    rng = random.Random(0)
    return [
        {
            "prompt": [rng.randint(10, 250) for _ in range(setting.size(rng.randint(20, 400), 9))],
            "max_tokens": setting.size(300, 20),
            "ignore_eos": True,
            "temperature": float(i % 2),
            "seed": i,
        }
        for i in range(setting.size(32, 3))
    ]


def answers_after_kill(driver: Driver, role: str, requests: list[dict[str, Any]]) -> tuple[list[list[int]], float]:
    """The tokens of all answers if the process is killed while they are computed, and the longest pause of a stream."""
    streams = [driver.submit(**request) for request in requests]
    times: list[float] = []
    for _ in streams[-1]:
        times.append(time.perf_counter())
        if len(times) == 5 and (pid := driver.pids[role]) is not None:
            os.kill(pid, signal.SIGKILL)
    pause_s = round(max(b - a for a, b in pairwise(times)), 3)
    return [stream.result().token_ids for stream in streams], pause_s
