"""Transformers modules whose weights are replaced temporarily."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


@contextmanager
def exchanged(model: PreTrainedModel, weights: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> Iterator[None]:
    """Replace the weights of the named modules in this block: each is derived from the module's own weight just before
    the module runs, and dropped afterwards.
    """
    modules = dict(model.named_modules())
    handles = []

    def exchange(module: Any, weight: torch.Tensor) -> None:
        module.weight = nn.Parameter(weight, requires_grad=False)

    for name, make in weights.items():
        module: Any = modules[name]
        own = module.weight.data
        handles += [
            module.register_forward_pre_hook(
                lambda module, _, make=make: exchange(module, make(module.weight.data).to(module.weight.dtype))
            ),
            module.register_forward_hook(lambda module, _, output, own=own: exchange(module, own)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
