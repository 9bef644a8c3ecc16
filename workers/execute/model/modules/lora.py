"""Adapters for transformers' own modules: hooks that add to the outputs of linear layers, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D  # a linear layer whose weight is [inputs, outputs]

from .....protocol.errors import ConfigError
from ...step import StepInputs
from ..lora import Adapter, LowRank
from ..parallel.group import ALONE, Group
from ..stacked_lora import Columns, StackedLinear
from ..states import rows_in_sight
from .exchange import exchanged


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
        self._columns = Columns(adapters, self._device)
        self._foreign: torch.Tensor | None = None  # of the current step, see ``Columns``
        for name in sorted({name for adapter in adapters for name in adapter.updates}):
            updates = {i: each.updates[name] for i, each in enumerate(adapters) if name in each.updates}
            linear[name].register_forward_hook(self._hook(name, updates))

    def _hook(self, name: str, updates: dict[int, LowRank]) -> Any:
        of_dtypes: dict[torch.dtype, StackedLinear] = {}  # the self-test may run the model in another dtype first

        def add(module: Any, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            if self._foreign is None:
                return output
            inputs, outputs = arguments[0].reshape(-1, arguments[0].shape[-1]), output.view(-1, output.shape[-1])
            foreign = self._foreign[rows_in_sight.get()]
            if len(inputs) != len(foreign):
                raise ConfigError(f"{name} gets {len(inputs)} of {len(foreign)} tokens", param="lora_modules")
            # Only now, in the self-test: depending on the family, a rank has a share of inputs and outputs, or all.
            if (stacked := of_dtypes.get(output.dtype)) is None:
                stacked = self._stack(module.weight, updates, inputs.shape[1], outputs.shape[1])
                of_dtypes[output.dtype] = stacked
            stacked.add(inputs, outputs, foreign)
            return output

        return add

    def _stack(
        self, weight: torch.Tensor, updates: dict[int, LowRank], num_inputs: int, num_outputs: int
    ) -> StackedLinear:
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
        stacked = StackedLinear.stack([(0, own)], self._columns, like=like, sum_ranks=sum_ranks)
        assert stacked is not None, "only called for modules that an adapter changes"
        return stacked

    @contextmanager
    def applied(self, inputs: StepInputs) -> Iterator[None]:
        """Within this block, the adapters of this step are active."""
        if (owners := inputs.token_adapters) is None:
            yield
            return
        with self.applied_to(torch.from_numpy(owners).to(self._device)):
            yield

    @contextmanager
    def applied_to(self, owners: torch.Tensor | None) -> Iterator[None]:
        """Within this block, token t has the adapter of number ``owners[t]``, int32 [T]; 0: none. None: none at all."""
        self._foreign = None if owners is None else self._columns.foreign_to(owners)
        try:
            yield
        finally:
            self._foreign = None


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
