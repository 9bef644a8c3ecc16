"""Sequences and engines for benchmarks of the step loop, which need no package that only the other processes do."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.protocol.config import SchedulerConfig
from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.scheduling.scheduler import Scheduler
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import Runner

if TYPE_CHECKING:
    from triptych.protocol.model_card import ModelCard


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


def make_engine(
    runner: Runner,
    card: ModelCard,
    config: SchedulerConfig,
    *,
    clock: Callable[[], int] = lambda: 0,
    depth: int = 0,
    **options: Any,
) -> Engine:
    """The engine of a model; ``options`` are those of its scheduler."""
    scheduler = Scheduler(
        config, page_size=card.page_size, num_pages=card.num_pages, max_model_len=card.max_model_len,
        num_snapshots=card.num_snapshots, **options,
    )  # fmt: skip
    return Engine(scheduler, runner, clock=clock, depth=depth)
