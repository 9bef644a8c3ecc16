"""What does it cost to encode and decode a message? Prints one JSON line; µs per message."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import environment, publish, spread
from triptych.protocol import messages as m
from triptych.protocol.codec import decode, decode_public, encode

SEED, WARM_UP, REPEATS, CALLS = 0, 5, 101, 200
STEP_ROWS, TEXT_ROWS, PROMPT_TOKENS = 256, 64, 1000
MAX_BYTES = 8 << 20


def main() -> None:
    messages = {"StepDone": step_done(), "Text": text(), "Submit": submit()}
    results = {name: measure(message) for name, message in messages.items()}
    about = environment("msgpack", "numpy")
    config = {"step_rows": STEP_ROWS, "text_rows": TEXT_ROWS, "prompt_tokens": PROMPT_TOKENS, "calls": CALLS}
    report = {"what": "codec", "unit": "us", **about, "config": config, "seed": SEED, "warm_up": WARM_UP}
    publish({**report, "results": results})


def step_done() -> m.StepDone:
    rng = np.random.default_rng(SEED)
    columns = (rng.integers(0, 1 << 15, STEP_ROWS).astype("<u4").tobytes() for _ in range(4))
    slots, generations, indices, token_ids = columns
    return m.StepDone(slots, generations, indices, token_ids, bytes(STEP_ROWS))


def text() -> m.Text:
    return m.Text([[f"{i:032x}", 17, 68, bytes(4), " word", None, 101.5] for i in range(TEXT_ROWS)])


def submit() -> m.Submit:
    ids = np.random.default_rng(SEED).integers(0, 1 << 15, PROMPT_TOKENS).astype("<i4").tobytes()
    return m.Submit("a" * 32, {"prompt_token_ids": ids, "max_tokens": 256, "temperature": 0.7, "stop": ["\n\n"]})


def measure(message: Any) -> dict[str, Any]:
    frame = encode(message)
    parts: dict[str, list[float]] = {"encode": [], "decode": [], "decode_public": [], "encode_and_decode": []}
    for repeat in range(WARM_UP + REPEATS):
        marks = [perf_counter_ns()]
        for run in (lambda: encode(message), lambda: decode(frame), lambda: decode_public(frame, max_bytes=MAX_BYTES)):
            for _ in range(CALLS):
                run()
            marks.append(perf_counter_ns())
        if repeat >= WARM_UP:
            encoding, decoding, public = np.diff(marks) / 1000 / CALLS
            for part, value in zip(parts, (encoding, decoding, public, encoding + decoding), strict=True):
                parts[part].append(float(value))
    return {"bytes": len(frame), **{part: spread(samples) for part, samples in parts.items()}}


if __name__ == "__main__":
    main()
