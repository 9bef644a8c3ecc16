"""Adapters on transformers' own modules: hooks that add to the outputs of linear layers, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ....protocol.errors import ConfigError
from ..step import Int32, StepInputs
from .lora import Adapter, LowRank


class TorchAdapters:
    """The adapters of a model, hooked into its modules. Outside of ``applied`` they add nothing."""

    def __init__(self, model: PreTrainedModel, adapters: Sequence[Adapter]) -> None:
        """
        Raises:
            ConfigError: an adapter does not fit the model.
        """
        modules = dict(model.named_modules())
        linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
        linear.pop("lm_head", None)
        shapes = {name: tuple(module.weight.shape) for name, module in linear.items()}
        self.adapters = adapters
        self._rows: list[tuple[int, torch.Tensor]] = []  # adapter, rows of the step that have it
        self._num_tokens = 0
        by_module: dict[str, dict[int, LowRank]] = {}
        for number, adapter in enumerate(adapters, 1):
            adapter.check_modules(shapes)
            for name, (a, b) in adapter.updates.items():
                dtype = linear[name].weight.dtype
                by_module.setdefault(name, {})[number] = LowRank(a.to(dtype), b.to(dtype))
        for name, updates in by_module.items():
            linear[name].register_forward_hook(self._hook(name, updates))

    def _hook(self, name: str, updates: dict[int, LowRank]) -> Any:
        def add(_: nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            wanted = [(rows, updates[number]) for number, rows in self._rows if number in updates]
            if not wanted:
                return output
            inputs, outputs = arguments[0].reshape(-1, arguments[0].shape[-1]), output.reshape(-1, output.shape[-1])
            if len(inputs) != self._num_tokens:
                raise ConfigError(f"{name} gets {len(inputs)} of {self._num_tokens} tokens", param="lora_modules")
            outputs = outputs.clone()
            for rows, (a, b) in wanted:
                outputs[rows] += inputs[rows] @ a.T @ b.T
            return outputs.view_as(output)

        return add

    @contextmanager
    def applied(self, inputs: StepInputs) -> Iterator[None]:
        """In this block the model computes this step."""
        if inputs.adapters is None:
            yield
            return
        owners = np.repeat(inputs.adapters, np.diff(inputs.query_starts))
        with self.applied_to(owners):
            yield

    @contextmanager
    def applied_to(self, owners: Int32) -> Iterator[None]:
        """In this block each token has the adapter of this number, [T], or none: 0."""
        self._num_tokens = len(owners)
        self._rows = [(n, torch.from_numpy(np.flatnonzero(owners == n))) for n in np.unique(owners).tolist() if n]
        try:
            yield
        finally:
            self._rows = []


@contextmanager
def merged(model: PreTrainedModel, adapter: Adapter) -> Iterator[None]:
    """In this block the weights are what the adapter makes of them, each for as long as it is used."""

    def with_update(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return weight + (b @ a.float()).to(weight.dtype)

    with exchanged(model, {name: partial(with_update, a=a, b=b) for name, (a, b) in adapter.updates.items()}):
        yield


@contextmanager
def exchanged(model: PreTrainedModel, weights: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> Iterator[None]:
    """In this block modules of these names have other weights, made of their own for as long as they are used."""
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
