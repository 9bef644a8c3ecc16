"""Prompts and requests for benchmarks of the step loop and the journal."""

from __future__ import annotations

import numpy as np

from triptych.protocol.record import RequestRecord


def random_prompts(count: int, num_tokens: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng([count, seed])
    return [list(map(int, rng.integers(10, 1000, num_tokens))) for _ in range(count)]


def make_record(prompt: list[int], num_tokens: int) -> RequestRecord:
    """A greedy request for exactly ``num_tokens`` tokens."""
    return RequestRecord(
        request_id="a" * 32,
        digest=1,
        prompt=np.array(prompt, "<i4").tobytes(),
        num_truncated_tokens=0,
        token_capacity=num_tokens,
        seed=1,
        lease_s=10.0,
        sampling={"max_tokens": num_tokens, "ignore_eos": True},
    )
