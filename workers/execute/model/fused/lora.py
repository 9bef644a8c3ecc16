"""LoRA adapters of a fused decoder: what they add to its products, laid out like its merged matrices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...kernels.triton_matmul import invariant_linear
from ..lora import Adapter
from ..spec.decoder import DecoderSpec
from ..stacked_lora import Columns, StackedLinear
from .weights import FusedWeights


class AdaptedLayer(NamedTuple):
    """Additions to a layer's products, by the field names of ``FusedLayer``; None where no adapter adds anything."""

    qkv: StackedLinear | None = None
    output: StackedLinear | None = None
    gate_up: StackedLinear | None = None
    down: StackedLinear | None = None


class FusedAdapters:
    """Adapters on the device of a decoder's weights, in the dtype of its activations.

    Without adapters, nothing is allocated.
    """

    def __init__(self, weights: FusedWeights, adapters: Sequence[Adapter]) -> None:
        """
        Raises:
            ConfigError: an adapter does not fit the model.
        """
        spec = weights.spec
        products = [_products(spec, index) for index in range(spec.num_layers)]
        tensors = spec.tensors()
        shapes = {m: tensors[f"{m}.weight"] for layer in products for modules in layer for m in modules}
        for adapter in adapters:
            adapter.check_modules(shapes)
        self._like = weights.embedding
        self._product = invariant_linear if weights.format.is_invariant else F.linear
        self._columns = Columns(adapters, self._like.device) if adapters else None
        self.layers = [AdaptedLayer()] * spec.num_layers
        if adapters:
            self.layers = [AdaptedLayer(*(self._stack(m, shapes, adapters) for m in layer)) for layer in products]

    def foreign_to(self, adapters: torch.Tensor | None) -> torch.Tensor | None:
        """Return ``Columns.foreign_to``, or None if there is nothing to add."""
        return None if adapters is None or self._columns is None else self._columns.foreign_to(adapters)

    def _stack(
        self, modules: Sequence[str], shapes: dict[str, tuple[int, ...]], adapters: Sequence[Adapter]
    ) -> StackedLinear | None:
        assert self._columns is not None, "there are adapters"
        starts = accumulate((shapes[module][0] for module in modules), initial=0)
        added = [{i: each.updates[m] for i, each in enumerate(adapters) if m in each.updates} for m in modules]
        matrices = zip(starts, added, strict=False)  # the last start is the end
        return StackedLinear.stack(matrices, self._columns, like=self._like, product=self._product)


def _products(spec: DecoderSpec, layer: int) -> list[list[str]]:
    """List the modules of each product of a layer that can be adapted, in the field order of ``AdaptedLayer``."""
    names = spec.layer(layer)
    merged = [names.qkv, (names.output,), *(() if names.experts else (names.gate_up, (names.down,)))]
    return [[name.removesuffix(".weight") for name in group] for group in merged]


def add_to(
    output: torch.Tensor, x: torch.Tensor, added: StackedLinear | None, foreign: torch.Tensor | None
) -> torch.Tensor:
    """Add what adapters contribute to a product of x [T, K] to ``output`` [T, N] in place, and return it."""
    if added is not None and foreign is not None:
        added.add(x, output, foreign)
    return output
