"""Adapters in the layout of the compiled kernels, see ``Update`` in ``kernels/src/abi.h``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch

from ...kernels.memory import Arena, padded
from ...kernels.structures import LANES, Format, Matrix, Update
from ..lora import Adapter, LowRank
from ..spec.decoder import DecoderSpec
from ..spec.delta import Part

# Per layer: queries, keys, values, output, gate, up, down; betas and rates of a delta rule; projection, dt and output
# of a state space. See Tensor in abi.h.
_TENSORS = 12
_PRODUCTS = (0, 0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 7)  # the packed matrix that contains each of them


class PackedAdapter:
    """One adapter: what it adds to each tensor of each layer, in memory of its own."""

    def __init__(self, spec: DecoderSpec, adapter: Adapter, format_: Format) -> None:
        """
        Raises:
            ConfigError: the adapter does not fit the model.
        """
        adapter.check_modules(_module_shapes(spec))
        self.name = adapter.name
        self.max_rank = 0  # padded to a multiple of LANES
        self.adapted_products = 0  # bit mask over products
        self._format = format_.arithmetic
        self._cached = torch.float32 if format_ is Format.FLOAT32 else torch.bfloat16
        parts = list(_all_parts(spec, adapter))
        self.updates = (Update * len(parts))()
        self._arena = Arena(sum(_num_bytes(part) for part in parts if part is not None))
        for index, part in enumerate(parts):
            if part is not None:
                self._fill(self.updates[index], part)
                self.adapted_products |= 1 << _PRODUCTS[index % _TENSORS]

    def _fill(self, update: Update, part: LowRank) -> None:
        rank = padded(len(part.a), LANES)
        self.max_rank = max(self.max_rank, rank)
        update.down = self._down(part.a)
        update.up = self._keep(in_vectors(part.b.to(self._cached), num_inputs=rank))
        update.rank = rank
        update.num_vectors = padded(len(part.b), LANES) // LANES

    def _down(self, a: torch.Tensor) -> Matrix:
        if self._format is not Format.INT8:
            return Matrix(blocks=self._keep(in_vectors(a.to(self._cached))), num_inputs=a.shape[1])
        # Transformed and quantised like the weights of the model, see Narrowing in kernels/src/pack.h.
        weights, block = transformed(a.float())
        limits = weights.abs().amax(dim=1).clamp(min=1e-30)
        quantised = torch.round(weights * (127.0 / limits)[:, None]).to(torch.int8)
        rest = padded(len(a), LANES) - len(a)
        return Matrix(
            blocks=self._keep(in_vectors(quantised)),
            scales=self._keep(torch.nn.functional.pad(limits / 127.0 / block, (0, rest))),
            offsets=self._keep(torch.nn.functional.pad(128 * quantised.sum(dim=1, dtype=torch.int32), (0, rest))),
            num_inputs=a.shape[1],
        )

    def _keep(self, tensor: torch.Tensor) -> int:
        """Copy a tensor into the arena and return the address."""
        data = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        place = self._arena.take(len(data))
        place[:] = data
        return int(place.ctypes.data)


class PackedAdapters:
    """The adapters of a decoder by their places. Some may be free, and no request has the adapter of a free place."""

    def __init__(self, places: Sequence[PackedAdapter | None]) -> None:
        self.places = places
        known = [adapter for adapter in places if adapter is not None]
        self.max_rank = max((adapter.max_rank for adapter in known), default=0)
        self.adapted_products = reduce(or_, (adapter.adapted_products for adapter in known), 0)
        size = max((len(adapter.updates) for adapter in known), default=0)
        self.updates = (Update * (len(places) * size))()
        for place, adapter in enumerate(places):
            if adapter is not None:
                self.updates[place * size : (place + 1) * size] = list(adapter.updates)


def transformed(rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The Walsh-Hadamard transform of each block of inputs and the size of a block, see ``kernels/src/hadamard.h``."""
    block, distance = rows.shape[1] & -rows.shape[1], 1
    while distance < block:
        x, y = rows.view(len(rows), -1, 2, distance).unbind(2)
        rows = torch.stack((x + y, x - y), 2).flatten(1)
        distance *= 2
    return rows, block


def in_vectors(weights: torch.Tensor, *, num_inputs: int = 0) -> torch.Tensor:
    """Rearrange [outputs, inputs] to [outputs / 16, steps, 16, group], zero-padded to ``num_inputs`` inputs or more."""
    group = 4 // weights.dtype.itemsize
    rows, columns = padded(len(weights), LANES), padded(max(weights.shape[1], num_inputs), group)
    grid = weights.new_zeros(rows, columns)
    grid[: weights.shape[0], : weights.shape[1]] = weights
    return grid.view(rows // LANES, LANES, columns // group, group).transpose(1, 2)


def _num_bytes(part: LowRank) -> int:
    """The most bytes that ``_fill`` takes from the arena."""
    rank = padded(len(part.a), LANES)
    return 4 * rank * (padded(part.a.shape[1]) + padded(len(part.b))) + 4 * padded(4 * rank)


class _Module(NamedTuple):
    """A linear module of a layer."""

    name: str
    num_inputs: int
    sizes: list[int]  # number of outputs of each tensor in it
    first: int  # index of the first of these tensors
    order: list[int] | None = None  # of its rows in the tensors; None: unchanged


def _modules(spec: DecoderSpec, layer: int) -> list[_Module]:
    names, hidden, found = spec.layer(layer), spec.hidden_size, list[_Module]()

    def add(
        group: Sequence[str], num_inputs: int, sizes: Sequence[int], first: int, parts: Sequence[Part] = ()
    ) -> None:
        split = [list(sizes)] if len(group) == 1 else [[size] for size in sizes]
        order = _order(parts) if len(parts) > len(sizes) else None
        for number, (name, own) in enumerate(zip(group, split, strict=True), first):
            found.append(_Module(name.removesuffix(".weight"), num_inputs, own, number, order))

    if spec.attends[layer]:
        add(names.qkv, hidden, spec.qkv_sizes, 0, spec.qkv_parts)
        add([names.output], spec.attended_size, [hidden], 3)
    if spec.is_recurrent[layer] and (space := spec.space) is not None:
        num_rows, heads = space.num_outputs + space.num_channels, space.num_heads
        add([names.space.projection], hidden, (num_rows, heads), 9, [*space.inputs, Part(heads, num_rows)])
        add([names.space.output], space.num_outputs, [hidden], 11)
    elif spec.is_recurrent[layer] and (delta := spec.delta) is not None:
        outputs, heads = delta.num_outputs, delta.num_value_heads
        add(names.qkv, hidden, (delta.num_channels, outputs), 0, delta.inputs)
        add(names.delta.gates, hidden, (heads, heads), 7, delta.gates(heads))
        add([names.output], outputs, [hidden], 3)
    elif spec.is_recurrent[layer]:
        add(names.qkv, hidden, [hidden] * 3, 0)
        add([names.output], hidden, [hidden], 3)
    for mlp, size in spec.mlps(names):
        if mlp is names:  # routed experts are not adapted
            add(names.gate_up, hidden, *(([size] * 2, 4) if spec.has_gates else ([size], 5)))
            add([names.down], size, [hidden], 6)
    return found


def _order(parts: Iterable[Part]) -> list[int]:
    """For each place in a matrix with these parts, the row that belongs there."""
    row_at: dict[int, int] = {}
    for part in parts:
        row_at |= {part.first + n: len(row_at) + n for n in range(part.num_rows)}
    return [row_at[place] for place in sorted(row_at)]


def _module_shapes(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Shapes [outputs, inputs] of the modules that can be adapted."""
    layers = (_modules(spec, layer) for layer in range(spec.num_layers))
    return {module.name: (sum(module.sizes), module.num_inputs) for layer in layers for module in layer}


def _all_parts(spec: DecoderSpec, adapter: Adapter) -> Iterator[LowRank | None]:
    """The adapter's update to each tensor of each layer, or None."""
    for layer in range(spec.num_layers):
        parts: list[LowRank | None] = [None] * _TENSORS
        for name, _, sizes, first, order in _modules(spec, layer):
            if (update := adapter.updates.get(name)) is not None:
                rows = torch.split(update.b if order is None else update.b[order], sizes)
                parts[first : first + len(sizes)] = (LowRank(update.a, each) for each in rows)
        yield from parts
