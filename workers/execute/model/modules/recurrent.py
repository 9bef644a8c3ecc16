"""Recurrent layers of transformers models: finds their modules, and passes each its sequences one by one.

Such a module (a gated delta rule, a state space, a short convolution) summarizes a sequence in a state of fixed size.
It would treat a ragged batch as one sequence. So its ``forward`` is replaced by one that splits the batch and passes
the states of its sequences in place of transformers' cache.

Sources: Gu and Dao 2023 (selective state spaces), Yang et al. 2024 (gated delta networks).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import nan
from types import FunctionType
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from .....protocol.errors import ConfigError
from ...step import StepCut
from ..states import Mixer, SequenceStates, StateKey, StateLayout, StateShape, StepCache

_Outputs: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
_CACHE_NAMES = ("cache", "cache_params", "past_key_values")  # of the argument for the cache, by version and model
_UPDATES = {"update_conv_state", "update_recurrent_state"}  # cache methods that only modules with a state call


class LayerStates(Protocol):
    """Computes recurrent modules within a forward pass."""

    def mix(self, number: int, run: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs [1, T, ...] of module ``number`` for ``hidden`` [1, T, C], a ragged batch."""
        ...


_current: ContextVar[LayerStates | None] = ContextVar("triptych_layer_states", default=None)


@contextmanager
def remembering(states: LayerStates | None) -> Iterator[None]:
    """Within this block, forward passes keep their state in ``states``. None: each computes a single whole sequence."""
    token = _current.set(states)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def going_on(states: SequenceStates | None, cut: StepCut | None) -> Iterator[None]:
    """Within this block, the model computes one step from its sequences' ``states``. None: the model has no states."""
    if states is not None:
        assert cut is not None, "a step of recurrent layers has a cut"
        states.begin_step(cut)
    with remembering(states):
        yield


def cut_batches(model: PreTrainedModel) -> list[nn.Module]:
    """Replace ``forward`` of the recurrent modules of ``model`` (see ``remembering``); returns the modules in order.

    Raises:
        ConfigError: this version of transformers passes them their states in another way.
    """
    modules = [module for module in model.modules() if _keeps_state(type(module))]
    if modules and not hasattr(Cache, "get_recurrent_state"):
        raise ConfigError(
            f"model family {model.config.model_type!r} has recurrent layers, which need a newer transformers",
            param="model",
        )
    for number, module in enumerate(modules):
        module.forward = partial(_forward, number, module.forward, inspect.signature(module.forward))
    return modules


def _forward(
    number: int, forward: Callable[..., _Outputs], signature: inspect.Signature, *args: Any, **kwargs: Any
) -> _Outputs:
    states = _current.get()
    if states is None:
        return forward(*args, **kwargs)
    bound = signature.bind(*args, **kwargs)
    cache_name = next(name for name in _CACHE_NAMES if name in signature.parameters)
    sizes: list[torch.Size] = []  # of one token in each of several outputs, such as queries, keys and values

    def run(hidden: torch.Tensor, cache: Any) -> torch.Tensor:
        bound.arguments["hidden_states"], bound.arguments[cache_name] = hidden, cache
        output = forward(*bound.args, **bound.kwargs)
        if isinstance(output, torch.Tensor):
            return output
        sizes[:] = [part.shape[2:] for part in output]
        return torch.cat([part.flatten(2) for part in output], dim=-1)

    output = states.mix(number, run, bound.arguments["hidden_states"])
    if not sizes:
        return output
    parts = output.split_with_sizes([size.numel() for size in sizes], dim=-1)
    return tuple(part.view(*part.shape[:2], *size) for part, size in zip(parts, sizes, strict=True))


def _keeps_state(kind: type[nn.Module]) -> bool:
    """Whether one of its methods passes a new state to a cache."""
    if not kind.__module__.startswith("transformers.models."):
        return False
    methods = (inspect.unwrap(value) for value in vars(kind).values() if inspect.isfunction(value))
    return any(_UPDATES & set(method.__code__.co_names) for method in methods if isinstance(method, FunctionType))


class StateProbe:
    """A ``LayerStates`` that keeps no states, but records which ones each module would keep."""

    def __init__(self) -> None:
        self.calls: list[int] = []  # number of the module in each call, in order
        self._shapes: dict[StateKey, StateShape] = {}
        self._stepwise: set[int] = set()

    @property
    def layout(self) -> StateLayout:
        return StateLayout(self._shapes, frozenset(self._stepwise))

    def mix(self, number: int, run: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        self.calls.append(number)
        output = run(hidden, _ProbingCache(number, self._shapes))
        if self._begins_anew(number, run, hidden):
            self._stepwise.add(number)
        return output

    def _begins_anew(self, number: int, run: Mixer, hidden: torch.Tensor) -> bool:
        """Whether the module ignores its recurrent state for a chunk of several tokens: its outputs are not NaN even if
        that state is.
        """
        states = {
            key: hidden.new_full((1, *shape.sizes), nan if key.kind == "recurrent" else 0.0, dtype=shape.dtype)
            for key, shape in self._shapes.items()
            if key.module == number
        }
        is_recurrent = any(key.kind == "recurrent" for key in states)
        return is_recurrent and not bool(run(hidden, StepCache(number, states)).isnan().any())


class _ProbingCache:
    """Stands in for transformers' cache of a sequence without any tokens yet, and records the shapes of new states."""

    def __init__(self, number: int, shapes: dict[StateKey, StateShape]) -> None:
        self._number, self._shapes = number, shapes

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    get_recurrent_state = get_conv_state

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        sizes = (*conv_states.shape[1:-1], conv_kernel_size or conv_states.shape[-1])
        self._shapes[StateKey(self._number, "conv", state_idx)] = StateShape(sizes, conv_states.dtype)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        key = StateKey(self._number, "recurrent", state_idx)
        self._shapes[key] = StateShape(tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        return recurrent_states
