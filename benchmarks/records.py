"""Requests as they lie in the journal, for what measures the journal."""

from __future__ import annotations

import numpy as np

from triptych.protocol.record import RequestRecord


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
