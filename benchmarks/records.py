"""Prompts, requests and sequences for benchmarks of the step loop and the journal."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from triptych.protocol.record import RequestRecord
from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.scheduling.sequence import Sequence


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


def make_sequence(
    index: int, prompt: Items[int], max_tokens: int, *, generation: int = 0, seed: int = 0, **sampling: Any
) -> Sequence:
    """The ``index``-th to arrive. It only ends by its length, and is greedy unless ``sampling`` says otherwise."""
    tokens = np.zeros(len(prompt) + max_tokens, np.int32)
    tokens[: len(prompt)] = prompt
    return Sequence(
        key=(index, generation),
        tokens=tokens,
        num_prompt_tokens=len(prompt),
        num_tokens=len(prompt),
        params=SamplingParams(max_tokens=max_tokens, **sampling),
        seed=seed,
        arrival=index,
    )
