"""What every backend makes of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .facts import ModelFacts
from .pool import LayerShape, PoolSize
from .step_runner import StepRunner


class Loaded(NamedTuple):
    """A model in memory, before it has pages."""

    facts: ModelFacts
    dtype: torch.dtype
    backend: str
    shapes: list[LayerShape]
    make_runner: Callable[[PoolSize], StepRunner]
    make_follower: Callable[[PoolSize], StepRunner] | None = None  # of ranks: computes its share and orders nothing
    state_bytes: int = 0  # of the states of recurrent layers; 0: there are none
