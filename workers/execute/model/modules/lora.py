"""Adapters for transformers' own modules: hooks that add to the outputs of linear layers, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D  # a linear layer whose weight is [inputs, outputs]

from .....protocol.errors import ConfigError
from ...kernels.support import why_no_triton
from ..lora import Adapter, LowRank
from ..parallel.group import ALONE, Group
from ..stacked_lora import StackedAdapters
from ..states import rows_in_sight
from .exchange import exchanged


class LinearUpdates(Protocol):
    """The updates of all adapters to one matrix."""

    def add(self, x: torch.Tensor, output: torch.Tensor, rows: Any) -> None:
        """Add each row's own to ``output`` [T, N], the product of x [T, K], in place."""
        ...


class Layout(Protocol):
    """How the weights of all adapters lie on a device: ``GroupedAdapters`` or ``StackedAdapters``."""

    def rows_of(self, adapters: torch.Tensor) -> Any:
        """What ``LinearUpdates.add`` needs to know of the adapters of a step's tokens, int32 [T]."""
        ...

    def stack(
        self,
        updates: Mapping[int, LowRank],
        *,
        like: torch.Tensor,
        sum_ranks: Callable[[torch.Tensor], None] | None = None,
    ) -> LinearUpdates: ...


class TorchAdapters:
    """The adapters of a model, hooked into its modules. Outside of ``applied`` they add nothing."""

    def __init__(self, model: PreTrainedModel, adapters: Sequence[Adapter], group: Group = ALONE) -> None:
        """
        Raises:
            ConfigError: an adapter does not fit the model.
        """
        modules = dict(model.named_modules())
        linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)}
        linear.pop("lm_head", None)
        shapes = {
            name: tuple(module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape)
            for name, module in linear.items()
        }
        for adapter in adapters:
            adapter.check_modules(shapes)
        self.adapters = adapters
        self._group = group
        self._device = model.device
        self.layout = _layout(adapters, self._device)
        self._owners: torch.Tensor | None = None  # the adapters of the current step's tokens
        self._rows: Any = None  # what the layout makes of them
        for name in sorted({name for adapter in adapters for name in adapter.updates}):
            updates = {i: each.updates[name] for i, each in enumerate(adapters) if name in each.updates}
            linear[name].register_forward_hook(self._hook(name, updates))

    def _hook(self, name: str, updates: dict[int, LowRank]) -> Any:
        of_dtypes: dict[torch.dtype, LinearUpdates] = {}  # the self-test may run the model in another dtype first

        def add(module: Any, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            if self._owners is None:
                return output
            inputs, outputs = arguments[0].reshape(-1, arguments[0].shape[-1]), output.view(-1, output.shape[-1])
            owners, rows = self._owners[rows_in_sight.get()], self._rows
            if len(inputs) != len(owners):
                raise ConfigError(f"{name} gets {len(inputs)} of {len(owners)} tokens", param="lora_modules")
            if len(owners) != len(self._owners):
                rows = self.layout.rows_of(owners)
            # Only now, in the self-test: depending on the family, a rank has a share of inputs and outputs, or all.
            if (stacked := of_dtypes.get(output.dtype)) is None:
                stacked = self._stack(module.weight, updates, inputs.shape[1], outputs.shape[1])
                of_dtypes[output.dtype] = stacked
            stacked.add(inputs, outputs, rows)
            return output

        return add

    def _stack(
        self, weight: torch.Tensor, updates: dict[int, LowRank], num_inputs: int, num_outputs: int
    ) -> LinearUpdates:
        """Stack the updates of this rank to ``num_outputs`` outputs from ``num_inputs`` inputs.

        If each rank has a share of the inputs, the partial results are summed over the ranks right after the down
        projection, where they are as narrow as the adapters: the layer's own sum precedes the hook.
        """
        own: dict[int, LowRank] = {}
        sum_ranks: Callable[[torch.Tensor], None] | None = None
        for index, (a, b) in updates.items():
            if a.shape[1] != num_inputs:
                a, sum_ranks = _cut_like(weight, a), self._group.sum
            own[index] = LowRank(a, b if len(b) == num_outputs else _cut_like(weight, b))
        like = torch.empty(0, dtype=weight.dtype, device=self._device)
        return self.layout.stack(own, like=like, sum_ranks=sum_ranks)

    @contextmanager
    def applied(self, owners: torch.Tensor | None) -> Iterator[None]:
        """Within this block, token t has the adapter of number ``owners[t]``, int32 [T]; 0: none. None: none at all."""
        self._owners, self._rows = owners, None if owners is None else self.layout.rows_of(owners)
        try:
            yield
        finally:
            self._owners = self._rows = None


def _layout(adapters: Sequence[Adapter], device: torch.device) -> Layout:
    """That of the kernels where they are compiled for the device, otherwise that of torch's products."""
    if device.type == "cpu" or why_no_triton(device) is not None:
        return StackedAdapters(adapters, device)
    from ..grouped_lora import GroupedAdapters  # which can be imported where Triton is installed

    return GroupedAdapters(adapters, device)


@contextmanager
def merged(model: PreTrainedModel, adapter: Adapter) -> Iterator[None]:
    """Within this block, the adapter is merged into the weights, each only while it is used."""

    def with_update(update: LowRank, weight: torch.Tensor) -> torch.Tensor:
        return weight + _product_like(weight, update)

    modules = dict(model.named_modules())
    updates = {
        name: LowRank(update.b.T, update.a.T) if isinstance(modules[name], Conv1D) else update
        for name, update in adapter.updates.items()
    }
    with exchanged(model, {name: partial(with_update, update) for name, update in updates.items()}):
        yield


def _product_like(weight: torch.Tensor, update: LowRank) -> torch.Tensor:
    """The update of the adapter to this weight, distributed like the weight."""
    device = weight.device
    added = (update.b.to(device).float() @ update.a.to(device).float()).to(weight.dtype)
    return _distributed_like(weight, added) if isinstance(weight, DTensor) else added


def _cut_like(weight: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of a tensor with the rows or the columns of ``weight``."""
    assert isinstance(weight, DTensor), "a plain tensor's shape has been compared already"
    return _distributed_like(weight, tensor).to_local()


def _distributed_like(weight: DTensor, tensor: torch.Tensor) -> DTensor:
    return distribute_tensor(tensor, weight.device_mesh, weight.placements, src_data_rank=None)
