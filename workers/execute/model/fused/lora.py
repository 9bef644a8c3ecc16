"""LoRA adapters of a fused decoder: what they add to its products, laid out like its merged matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ...kernels.triton_lora import AdapterTiles
from ..grouped_lora import GroupedAdapters, GroupedLinear
from ..lora import Adapter
from ..spec.decoder import DecoderSpec
from .weights import FusedWeights


class AdaptedLayer(NamedTuple):
    """Additions to a layer's products, by the field names of ``FusedLayer``; None where no adapter adds anything."""

    qkv: GroupedLinear | None = None
    output: GroupedLinear | None = None
    gate_up: GroupedLinear | None = None
    down: GroupedLinear | None = None


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
        self._grouped = GroupedAdapters(adapters, self._like.device) if adapters else None
        self.layers = [AdaptedLayer()] * spec.num_layers
        if adapters:
            self.layers = [AdaptedLayer(*(self._stack(m, shapes, adapters) for m in layer)) for layer in products]

    def rows_of(self, adapters: torch.Tensor | None) -> AdapterTiles | None:
        """Return ``GroupedAdapters.rows_of``, or None if there is nothing to add."""
        return None if adapters is None or self._grouped is None else self._grouped.rows_of(adapters)

    def _stack(
        self, modules: Sequence[str], shapes: dict[str, tuple[int, ...]], adapters: Sequence[Adapter]
    ) -> GroupedLinear | None:
        assert self._grouped is not None, "there are adapters"
        starts = accumulate((shapes[module][0] for module in modules), initial=0)
        added = [{i: each.updates[m] for i, each in enumerate(adapters) if m in each.updates} for m in modules]
        matrices = zip(starts, added, strict=False)  # the last start is the end
        return self._grouped.stack_merged(matrices, like=self._like) if any(added) else None


def _products(spec: DecoderSpec, layer: int) -> list[list[str]]:
    """List the modules of each product of a layer that can be adapted, in the field order of ``AdaptedLayer``."""
    names = spec.layer(layer)
    merged = [names.qkv, (names.output,), *(() if names.experts else (names.gate_up, (names.down,)))]
    return [[name.removesuffix(".weight") for name in group] for group in merged]


def adapted(
    product: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    added: GroupedLinear | None,
    tiles: AdapterTiles | None,
) -> torch.Tensor:
    """``product`` of x [T, K] with what adapters contribute to it."""
    return product(x) if added is None or tiles is None else added.product(product, x, tiles)
