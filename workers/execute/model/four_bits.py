"""Checkpoints whose weights are already quantised to four bits: GPTQ, AWQ and compressed-tensors.

In all of them a weight is ``scale * (number - zero)``, with a scale and a zero for each group of inputs of an output.
Sources: the packing of AutoGPTQ, of AutoAWQ's GEMM kernels, and "pack-quantized" of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ....protocol.errors import ConfigError
from ..kernels.matrix import FourBits
from ..kernels.structures import Format
from .decoder_spec import Unsupported
from .mapped_checkpoint import Checkpoint, Names
from .text_part import text_names

Array = npt.NDArray[Any]

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position in its word of each of eight outputs
_GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # stored zeros are smaller by this
_BITS = 4


class Weights(NamedTuple):
    """The unpacked weights of one linear layer."""

    numbers: npt.NDArray[np.uint8]  # [outputs, inputs]
    scales: Array  # [outputs, groups]
    zeros: Array  # [outputs, groups]
    group_of: Array | None  # [inputs], the group of each input; None if not stored


class QuantisedCheckpoint(Checkpoint):
    """As a mapping, contains what is not quantised; ``shapes`` and ``four_bits`` have the rest, by names of weights."""

    quantised_format: Format

    def __init__(self, folder: Path, layout: Layout, group_size: int, names: Names = text_names) -> None:
        super().__init__(folder, names)
        self._layout, self._group_size = layout, group_size
        is_coarse = group_size == -1 or group_size % Format.INT4.group_inputs == 0
        self.quantised_format = Format.INT4 if is_coarse else Format.FINE_INT4
        shapes, first = super().shapes(), layout.parts[0]
        self._modules = {name.removesuffix(f".{first}") for name in shapes if name.endswith(f".{first}")}
        for module in self._modules:
            if f"{module}.weight" in shapes:
                raise ConfigError(f"{folder} has both {module}.{first} and {module}.weight", param="model")
            for part in layout.parts:
                if len(shapes.get(f"{module}.{part}", ())) != 2:
                    raise ConfigError(f"{folder} has {module}.{first}, but no matrix {module}.{part}", param="model")

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if not self._is_part(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        stored = super().shapes()
        return {name: stored[name] for name in self} | {
            f"{module}.weight": self._layout.shape(stored[f"{module}.{self._layout.parts[0]}"])
            for module in self._modules
        }

    def _is_part(self, name: str) -> bool:
        module, _, part = name.rpartition(".")
        return module in self._modules and part in self._layout.all_parts

    def has_four_bits(self, name: str) -> bool:
        return name.removesuffix(".weight") in self._modules

    def four_bits(self, name: str) -> FourBits:
        module = name.removesuffix(".weight")
        parts = {part: self._array(f"{module}.{part}") for part in self._layout.all_parts}
        weights = self._layout.read({part: array for part, array in parts.items() if array is not None})
        return self._in_groups(module, weights)

    def _array(self, name: str) -> Array | None:
        """Read a tensor, floats as float32; None if it is not stored."""
        if name not in self._files:
            return None
        tensor = super().__getitem__(name)
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()

    def _in_groups(self, module: str, weights: Weights) -> FourBits:
        """Convert to a scale and a least value for each group of the format.

        Raises:
            Unsupported: inputs are not grouped in their own order.
            ConfigError: the groups are not those that the config states.
        """
        num_outputs, num_inputs = weights.numbers.shape
        size = num_inputs if self._group_size == -1 else min(self._group_size, num_inputs)
        expected = (num_outputs, -(-num_inputs // size))
        for name, values in (("scales", weights.scales), ("zeros", weights.zeros)):
            if values.shape != expected:
                text = f"{module} has {name} of shape {values.shape}, groups of {size} inputs have {expected}"
                raise ConfigError(text, param="model")
        if weights.scales.dtype != np.float32:
            raise ConfigError(f"{module} has scales of {weights.scales.dtype}, not floating point", param="model")
        self._check_order(module, weights.group_of, np.arange(num_inputs) // size)
        group = np.arange(0, num_inputs, self.quantised_format.group_inputs) // size
        scales = torch.from_numpy(weights.scales[:, group]).bfloat16().float().numpy()
        return FourBits(weights.numbers, scales, -weights.zeros[:, group] * scales)

    def _check_order(self, module: str, group_of: Array | None, expected: Array) -> None:
        if group_of is None:
            if self._layout.is_reordered:
                text = f"the config says that the inputs of {module} are reordered, but it has no g_idx"
                raise ConfigError(text, param="model")
        elif not np.array_equal(group_of, expected) and len(np.unique(group_of)) > 1:  # all equal: never filled in
            raise Unsupported(f"the inputs of {module} are grouped by their activations (desc_act), not in their order")


class Layout:
    """How one of these tools stores a linear layer."""

    parts: tuple[str, ...]  # required tensors, numbers first
    optional: ClassVar[tuple[str, ...]] = ()
    is_reordered = False  # according to the config; then the group of each input must be stored

    @property
    def all_parts(self) -> tuple[str, ...]:
        return self.parts + self.optional

    def shape(self, packed: tuple[int, ...]) -> tuple[int, int]:
        """Return [outputs, inputs] of numbers that are packed in this shape."""
        raise NotImplementedError

    def read(self, parts: Mapping[str, Array]) -> Weights:
        """Unpack a layer's tensors.

        Raises:
            ConfigError: the numbers are not packed into int32.
        """
        raise NotImplementedError


class _Gptq(Layout):
    parts = ("qweight", "qzeros", "scales")
    optional = ("g_idx",)

    def __init__(self, version: str, *, is_reordered: bool) -> None:
        if version not in _GPTQ_ZERO_OFFSETS:
            raise Unsupported(f"its weights are quantised by gptq {version}")
        self._zero_offset = _GPTQ_ZERO_OFFSETS[version]
        self.is_reordered = is_reordered

    def shape(self, packed: tuple[int, ...]) -> tuple[int, int]:
        return packed[1], packed[0] * 8

    def read(self, parts: Mapping[str, Array]) -> Weights:
        zeros = _unpacked(parts["qzeros"]).T + self._zero_offset & 15
        numbers = _unpacked(parts["qweight"].T)
        return Weights(numbers, parts["scales"].T, zeros.astype(np.float32), parts.get("g_idx"))


class _Awq(Layout):
    parts = ("qweight", "qzeros", "scales")

    def shape(self, packed: tuple[int, ...]) -> tuple[int, int]:
        return packed[1] * 8, packed[0]

    def read(self, parts: Mapping[str, Array]) -> Weights:
        numbers, zeros = (_unpacked(parts[name], _AWQ_ORDER).T for name in ("qweight", "qzeros"))
        return Weights(np.ascontiguousarray(numbers), parts["scales"].T, zeros.astype(np.float32), None)


class _PackQuantized(Layout):
    optional = ("weight_zero_point", "weight_g_idx", "weight_shape")

    def __init__(self, *, is_symmetric: bool, is_reordered: bool) -> None:
        self.parts = ("weight_packed", "weight_scale", *(() if is_symmetric else ("weight_zero_point",)))
        self.is_reordered = is_reordered

    def shape(self, packed: tuple[int, ...]) -> tuple[int, int]:
        return packed[0], packed[1] * 8

    def read(self, parts: Mapping[str, Array]) -> Weights:
        numbers, scales = _unpacked(parts["weight_packed"]), parts["weight_scale"]
        zeros = np.full_like(scales, 8)
        if "weight_zero_point" in parts:
            unpacked = _unpacked(parts["weight_zero_point"].T).T
            num_lacking = -len(numbers) % 8  # outputs missing from the last word
            zeros = unpacked[: len(unpacked) - num_lacking].astype(np.float32)
        return Weights(numbers, scales, zeros, parts.get("weight_g_idx"))


def find_layout(settings: Mapping[str, Any]) -> tuple[Layout, int]:
    """Return what the quantization_config says about the weights: their layout, and the inputs per group (-1: all).

    Raises:
        Unsupported: they are quantised in a way that is not supported here.
    """
    method = settings.get("quant_method")
    layout: Layout
    if method == "gptq":
        version = str(settings.get("checkpoint_format") or "gptq")
        layout = _Gptq(version, is_reordered=bool(settings.get("desc_act")))
        bits, group_size = settings.get("bits"), settings.get("group_size")
    elif method == "awq" and str(settings.get("version") or "gemm").lower() == "gemm":
        layout, bits, group_size = _Awq(), settings.get("bits"), settings.get("group_size")
    elif method == "compressed-tensors" and settings.get("format") == "pack-quantized":
        layout, bits, group_size = _of_scheme(settings)
    else:
        kind = settings.get("format") or settings.get("version") or ""
        raise Unsupported(f"its weights are quantised by {method} {kind}".rstrip())
    if bits != _BITS:
        raise Unsupported(f"its weights have {bits!r} bits, the kernels support {_BITS}")
    least = Format.FINE_INT4.group_inputs
    if not isinstance(group_size, int) or (group_size != -1 and (group_size < 1 or group_size % least)):
        raise Unsupported(f"its weights are in groups of {group_size!r} inputs, which is not a multiple of {least}")
    return layout, group_size


def _of_scheme(settings: Mapping[str, Any]) -> tuple[Layout, Any, Any]:
    """Return layout, bits and group size of the scheme, which must be the same for all layers."""
    schemes = list((settings.get("config_groups") or {}).values())
    if (
        len(schemes) != 1
        or any(schemes[0].get(name) for name in ("input_activations", "output_activations"))
        or schemes[0]["weights"].get("type") != "int"
    ):
        raise Unsupported("its layers are quantised by several schemes, or not only in their weights")
    if settings.get("transform_config"):
        raise Unsupported("its activations are transformed before they are multiplied by its weights")
    weights = schemes[0]["weights"]
    layout = _PackQuantized(
        is_symmetric=bool(weights.get("symmetric", True)), is_reordered=weights.get("actorder") in ("group", True)
    )
    return layout, weights.get("num_bits"), -1 if weights.get("strategy") == "channel" else weights.get("group_size")


def _unpacked(words: Array, places: tuple[int, ...] = tuple(range(8))) -> npt.NDArray[np.uint8]:
    """Unpack [..., n] words to [..., 8 n] numbers; ``places`` are their positions in a word."""
    if words.dtype != np.int32:
        raise ConfigError(f"its 4-bit weights are packed into {words.dtype}, not int32", param="model")
    bits = np.ascontiguousarray(words).view(np.uint32)
    numbers = np.empty((*bits.shape, 8), np.uint8)
    for index, place in enumerate(places):
        numbers[..., index] = bits >> np.uint32(_BITS * place) & np.uint32(15)
    return numbers.reshape(*bits.shape[:-1], -1)
