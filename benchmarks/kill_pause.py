"""How long does ``kill -9`` of execute interrupt streams with long prompts? Prints one JSON line.

In turns, one pipeline whose packed weights and KV pages outlive execute, one that has to pack the weights again, and
one that has to compute the pages again too (``--no-retain-kv``): some prompts of random tokens, and once all answers
have begun, a kill. Seconds until the first of them, and until each of them, goes on; and how many prompt tokens the new
process has computed for that. All answers are compared.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_models import SHAPES, make_model
from benchmarks.records import random_prompts
from benchmarks.report import environment, publish
from triptych import Driver
from triptych.protocol.run_dir import weights_path

LOOK_S = 0.005
KEPT = {"pages and weights": (True, True), "pages": (True, False), "nothing": (False, False)}


class Pause(NamedTuple):
    first_s: float  # until one of the streams goes on
    all_s: float
    prefill_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    folder, results = make_model(arguments.model), {}
    pauses: dict[str, list[Pause]] = {kept: [] for kept in KEPT}
    for turn in range(arguments.turns):
        prompts = random_prompts(arguments.streams, arguments.prompt_tokens, turn)
        answers = []
        for kept, (has_pages, has_weights) in KEPT.items():
            with Driver(str(folder), quantization=arguments.quantization, retain_kv=has_pages, lease_s=300.0) as driver:
                if not has_weights:
                    weights_path(driver.run_dir).unlink()
                pause, tokens = interrupt(driver, prompts)
            pauses[kept].append(pause)
            answers.append(tokens)
        assert answers[0] == answers[1] == answers[2], "what an earlier process has left changes an answer"
    for kept, found in pauses.items():
        medians = (round(statistics.median(values), 3) for values in zip(*found, strict=True))
        results[kept] = dict(zip(Pause._fields, medians, strict=True))
    publish({"what": "kill_pause", **environment("torch"), **vars(arguments), "results": results})


def interrupt(driver: Driver, prompts: list[list[int]]) -> tuple[Pause, list[list[int]]]:
    """Kill execute once all answers have begun; also the answers."""
    streams = [driver.submit(prompt, max_tokens=64, ignore_eos=True) for prompt in prompts]
    for stream in streams:
        next(iter(stream))
    os.kill(driver.pids["execute"] or 0, signal.SIGKILL)
    killed, before = time.monotonic(), [stream.num_tokens for stream in streams]
    went_on_s: dict[int, float] = {}
    while len(went_on_s) < len(streams):
        time.sleep(LOOK_S)
        for index, stream in enumerate(streams):
            if stream.num_tokens > before[index]:
                went_on_s.setdefault(index, time.monotonic() - killed)
    answers = [stream.result().token_ids for stream in streams]
    prefill_tokens = driver.stats()["execute"]["prefill_tokens"]
    return Pause(min(went_on_s.values()), max(went_on_s.values()), prefill_tokens), answers


if __name__ == "__main__":
    main()
