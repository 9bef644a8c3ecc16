"""Checkpoints whose weights are already quantised to four bits: GPTQ, AWQ, AutoRound and compressed-tensors.

In all of them a weight is ``scale * (number - zero)``, with a scale and a zero for each group of inputs of an output.
Some of the matrices may have eight bits instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from .....protocol.errors import ConfigError
from ...kernels.matrix import FourBits
from ...kernels.structures import Format
from ..spec.decoder import Unsupported
from .four_bit_layouts import BITS, Array, Stored, Weights
from .mapped import Checkpoint, Names
from .text_part import text_names

_MORE_BITS = 8  # of the matrices that are the exceptions


class Grid(NamedTuple):
    """Of one linear layer."""

    bits: int
    group_size: int  # inputs


class QuantisedCheckpoint(Checkpoint):
    """As a mapping, contains what is not in four bits; ``shapes`` and ``four_bits`` have the rest, by names of weights.

    Weights in eight bits are dequantised when they are read.
    """

    quantised_format: Format

    def __init__(self, folder: Path, stored: Stored, names: Names = text_names) -> None:
        super().__init__(folder, names)
        self._layout, self._group_size = stored.layout, stored.group_size
        shapes, first = super().shapes(), self._layout.parts[0]
        modules = [name.removesuffix(f".{first}") for name in shapes if name.endswith(f".{first}")]
        for module in modules:
            if f"{module}.weight" in shapes:
                raise ConfigError(f"{folder} has both {module}.{first} and {module}.weight", param="model")
            for part in self._layout.parts:
                if len(shape := shapes.get(f"{module}.{part}", ())) != 2 or 0 in shape:
                    raise ConfigError(f"{folder} has {module}.{first}, but no matrix {module}.{part}", param="model")
        self._grids = {module: self._grid(module, shapes, stored.has_exceptions) for module in modules}
        fours = [grid for grid in self._grids.values() if grid.bits == BITS]
        is_fine = any(size != -1 and size % Format.INT4.group_inputs for _, size in fours)
        self.quantised_format = Format.FINE_INT4 if is_fine else Format.INT4

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in super().__iter__() if not self._is_part(name))
        yield from (f"{module}.weight" for module, grid in self._grids.items() if grid.bits != BITS)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._dequantised(name) if self._is_made(name) else super().__getitem__(name)

    def made(self, names: Iterable[str]) -> dict[str, Callable[[], torch.Tensor]]:
        return {name: partial(self._dequantised, name) for name in names if self._is_made(name)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        stored = super().shapes()
        return {name: stored[name] for name in stored if not self._is_part(name)} | {
            f"{module}.weight": self._layout.shape(stored[f"{module}.{self._layout.parts[0]}"], grid.bits)
            for module, grid in self._grids.items()
        }

    def _is_part(self, name: str) -> bool:
        module, _, part = name.rpartition(".")
        return module in self._grids and part in self._layout.all_parts

    def _is_made(self, name: str) -> bool:
        grid = self._grids.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        return grid is not None and grid.bits != BITS

    def has_four_bits(self, name: str) -> bool:
        return name.removesuffix(".weight") in self._grids and not self._is_made(name)

    def four_bits(self, name: str) -> FourBits:
        module = name.removesuffix(".weight")
        return self._in_groups(module, self._read_module(module))

    def _grid(self, module: str, shapes: Mapping[str, tuple[int, ...]], has_exceptions: bool) -> Grid:
        """The bits and groups of a module: those of the config, unless its tensors are an exception.

        The config describes exceptions by patterns, which each tool matches in its own way; tensors leave no doubt.

        Raises:
            Unsupported: it has other bits than four or eight.
            ConfigError: its inputs do not form equal groups.
        """
        if not has_exceptions:
            return Grid(BITS, self._group_size)
        layout = self._layout
        parts = {part: shapes[f"{module}.{part}"] for part in layout.all_parts if f"{module}.{part}" in shapes}
        bits = layout.bits(parts, lambda part: self._array(f"{module}.{part}"))
        if bits not in (BITS, _MORE_BITS):
            raise Unsupported(f"{module} has {bits} bits, the kernels support {BITS}, and {_MORE_BITS} for some")
        _, num_inputs = layout.shape(parts[layout.parts[0]], bits)
        num_groups, size = layout.num_groups(parts), self._group_size
        if num_groups == (1 if size == -1 else -(-num_inputs // size)):
            return Grid(bits, size)
        own = num_inputs // num_groups
        if own * num_groups != num_inputs or (bits == BITS and own % Format.FINE_INT4.group_inputs):
            raise ConfigError(f"{module} has {num_groups} groups for {num_inputs} inputs", param="model")
        return Grid(bits, own)

    def _read_module(self, module: str) -> Weights:
        parts = {part: self._array(f"{module}.{part}") for part in self._layout.all_parts}
        stored = {part: array for part, array in parts.items() if array is not None}
        weights = self._layout.read(stored, self._grids[module].bits)
        self._check(module, weights)
        return weights

    def _array(self, name: str) -> Array | None:
        """Read a tensor, floats as float32; None if it is not stored."""
        if name not in self._files:
            return None
        tensor = super().__getitem__(name)
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()

    def _size(self, module: str, weights: Weights) -> int:
        """The inputs per group."""
        num_inputs: int = weights.numbers.shape[1]
        size = self._grids[module].group_size
        return num_inputs if size == -1 else min(size, num_inputs)

    def _check(self, module: str, weights: Weights) -> None:
        """
        Raises:
            Unsupported: inputs are not grouped in their own order.
            ConfigError: the groups are not those that the config states.
        """
        num_outputs, num_inputs = weights.numbers.shape
        size = self._size(module, weights)
        expected = (num_outputs, -(-num_inputs // size))
        for name, values in (("scales", weights.scales), ("zeros", weights.zeros)):
            if values.shape != expected:
                text = f"{module} has {name} of shape {values.shape}, groups of {size} inputs have {expected}"
                raise ConfigError(text, param="model")
        if weights.scales.dtype != np.float32:
            raise ConfigError(f"{module} has scales of {weights.scales.dtype}, not floating point", param="model")
        self._check_order(module, weights.group_of, np.arange(num_inputs) // size)

    def _in_groups(self, module: str, weights: Weights) -> FourBits:
        """Convert to a scale and a least value for each group of the format."""
        num_inputs = weights.numbers.shape[1]
        group = np.arange(0, num_inputs, self.quantised_format.group_inputs) // self._size(module, weights)
        scales = torch.from_numpy(weights.scales[:, group]).bfloat16().float().numpy()
        return FourBits(weights.numbers, scales, -weights.zeros[:, group] * scales)

    def _dequantised(self, name: str) -> torch.Tensor:
        """Of a weight in eight bits, float32."""
        module = name.removesuffix(".weight")
        weights = self._read_module(module)
        group = np.arange(weights.numbers.shape[1]) // self._size(module, weights)
        return torch.from_numpy((weights.numbers - weights.zeros[:, group]) * weights.scales[:, group])

    def _check_order(self, module: str, group_of: Array | None, expected: Array) -> None:
        if group_of is None:
            if self._layout.is_reordered:
                text = f"the config says that the inputs of {module} are reordered, but it has no g_idx"
                raise ConfigError(text, param="model")
        elif not np.array_equal(group_of, expected) and len(np.unique(group_of)) > 1:  # all equal: never filled in
            raise Unsupported(f"the inputs of {module} are grouped by their activations (desc_act), not in their order")
