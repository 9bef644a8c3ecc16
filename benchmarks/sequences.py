"""Sequences for benchmarks of the step loop, which need no package that only the other processes do."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.scheduling.sequence import Sequence


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
