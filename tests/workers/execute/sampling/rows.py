"""Rows for the sampler: sequences with given tokens and parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.scheduling.sequence import Sequence


def make_row(
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    *,
    seed: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    **params: Any,
) -> Sequence:
    """A sequence with these tokens, about to get its next one."""
    prompt, output = prompt or [1], output or []
    return Sequence(
        key=(0, 0),
        tokens=np.array([*prompt, *output, 0], dtype=np.int32),
        num_prompt_tokens=len(prompt),
        num_tokens=len(prompt) + len(output),
        params=SamplingParams(**params),
        seed=seed,
        arrival=0,
        stop_ids=stop_ids,
    )
