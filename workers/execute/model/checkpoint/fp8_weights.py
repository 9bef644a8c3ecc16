"""Checkpoints whose weights are published in FP8: a number in 8 bits (e4m3) times the scale of its block.

Only the weights are read. Scales of activations, keys and values serve products and pages in FP8, which do not happen
here, so they are ignored. Sources: "FP8 Formats for Deep Learning", Micikevicius et al., 2022; "DeepSeek-V3 Technical
Report", 2024, section 3.3, for blocks; "OCP Microscaling Formats (MX) Specification", version 1.0, 2023, for scales
that are powers of two; "float-quantized" of compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .....protocol.errors import ConfigError
from ..spec.decoder import Unsupported
from .mapped import Checkpoint, Names
from .text_part import text_names

_FP8 = "F8_E4M3"  # safetensors' name
_SCALES = ("_scale_inv", "_scale")  # suffixes to the name of a weight; its numbers are multiplied by either
_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")  # U8 holds exponents too, as MXFP8 is published
_NOT_NEEDED = {  # scales of activations, keys and values
    "activation_scale", "input_scale", "input_scale_ub", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale",
}  # fmt: skip
_OF_WEIGHTS = re.compile(r"(.*_)?(weight_(global_)?scale(_\w+)?|scale_inv|weight_zero_point|qscale_\w+)")
_COMPRESSED = {"float-quantized", "naive-quantized"}
_RUN = 1 << 15  # numbers looked up at a time, since numpy converts them to indices of eight bytes each
_USUAL_BLOCKS = {"fp8": (128, 128), "mxfp8": (1, 32)}  # used if the config states no block size


class Block(NamedTuple):
    """The size of a block of weights that share a scale."""

    outputs: int | None  # None: all
    inputs: int | None

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of weights [..., outputs, inputs]."""
        *stacked, outputs, inputs = shape
        return *stacked, -(-outputs // (self.outputs or outputs)), -(-inputs // (self.inputs or inputs))

    def fits(self, shape: Sequence[int], scales: Sequence[int]) -> bool:
        """Whether weights of ``shape`` have scales of shape ``scales``, which may lack trailing axes of size 1."""
        grid = self.grid(shape)
        return tuple(scales) == grid[: len(scales)] and all(size == 1 for size in grid[len(scales) :])


_TENSOR, _CHANNEL = Block(None, None), Block(1, None)


class Fp8Checkpoint(Checkpoint):
    """Contains the dequantised weights in float32: exactly number times scale, computed at every read."""

    def __init__(self, folder: Path, blocks: Sequence[Block], names: Names = text_names) -> None:
        """
        Raises:
            Unsupported: weights or scales are not of the kind that the config states.
            ConfigError: a scale is missing, or does not have the shape that its weight needs.
        """
        super().__init__(folder, names)
        shapes, types = super().shapes(), self.types()
        self._blocks: dict[str, Block] = {}
        self._scales: dict[str, str] = {}
        for name in (name for name, type_ in types.items() if type_ == _FP8):
            scale = self._scale_name(name)
            if types[scale] not in _SCALE_TYPES:
                raise Unsupported(f"{scale} is of type {types[scale]}, supported are: {', '.join(_SCALE_TYPES)}")
            is_matrix = len(shapes[name]) > 1 and 0 not in shapes[name]
            fitting = [block for block in blocks if is_matrix and block.fits(shapes[name], shapes[scale])]
            if not fitting:
                text = f"{scale} in {folder} has shape {shapes[scale]}, weights {shapes[name]} in blocks of"
                known = " or ".join(f"{block.outputs or 'all'} x {block.inputs or 'all'}" for block in blocks)
                grids = " or ".join(str(block.grid(shapes[name])) for block in blocks if is_matrix)
                raise ConfigError(f"{text} {known} have {grids or 'none'}", param="model")
            self._blocks[name], self._scales[name] = fitting[0], scale
        scales = set(self._scales.values())
        self._wanted = dict.fromkeys(
            n for n in self._files if n not in scales and n.rpartition(".")[2] not in _NOT_NEEDED
        )
        understood = {*self._scales, *scales}
        check_types(folder, {name: type_ for name, type_ in types.items() if name not in understood})
        self._check_rest()

    def _scale_name(self, name: str) -> str:
        found = [name + ending for ending in _SCALES if name + ending in self._files]
        if len(found) != 1:
            wanted = " or ".join(name + ending for ending in _SCALES)
            raise ConfigError(f"{name} is in FP8 and has {len(found)} scales, not one: {wanted}", param="model")
        return found[0]

    def _check_rest(self) -> None:
        """Check the tensors other than quantised weights and their scales.

        Raises:
            Unsupported: one of them may affect the values of the quantised weights.
        """
        modules = {name.removesuffix(".weight") for name in self._scales if name.endswith(".weight")}
        for name in self:
            module, _, part = name.rpartition(".")
            if is_of_quantised(name) or (module in modules and part not in ("weight", "bias")):
                raise Unsupported(f"it has the tensor {name}, whose effect on its FP8 weights is unknown")

    def __contains__(self, name: object) -> bool:
        return name in self._wanted  # Mapping's own would compute the weight to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.shape(name) for name in self}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a tensor, dequantised if it is a weight in FP8.

        Raises:
            ConfigError: a scale is not a finite number.
        """
        stored = super().__getitem__(name)
        if name not in self._scales:
            return stored
        weights = _read(stored)
        _scale(weights, self._scale_of(name), self._blocks[name])
        return weights

    def made(self, names: Iterable[str]) -> dict[str, Callable[[], torch.Tensor]]:
        return {name: partial(self.__getitem__, name) for name in names if name in self._scales}

    def check_scales(self) -> None:
        """Read all scales.

        Raises:
            ConfigError: a scale is not a finite number.
        """
        for name in self._scales:
            self._scale_of(name)

    def _scale_of(self, name: str) -> torch.Tensor:
        stored = super().__getitem__(self._scales[name])
        if stored.dtype == torch.uint8:
            stored = stored.view(torch.float8_e8m0fnu)
        scales = stored.float().reshape(self._blocks[name].grid(self.shape(name)))
        if not torch.isfinite(scales).all():
            raise ConfigError(f"{self._scales[name]} has scales that are not finite", param="model")
        return scales


def fp8_blocks(settings: Mapping[str, Any]) -> list[Block] | None:
    """Return the block sizes that the quantization_config allows; None if it does not describe weights in FP8.

    Raises:
        Unsupported: it describes weights in FP8 in a way that is not supported here.
    """
    method = settings.get("quant_method")
    if method in _USUAL_BLOCKS:
        if (kind := settings.get("expert_dtype", "fp8")) != "fp8":
            raise Unsupported(f"its experts are quantised by {kind}")
        if "weight_block_size" not in settings:
            return [_TENSOR, Block(*_USUAL_BLOCKS[method])]
        return [_TENSOR if (size := settings["weight_block_size"]) is None else _block(size)]
    if method == "fbgemm_fp8":
        return [_CHANNEL]
    if method == "modelopt":
        known = {"FP8": _TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": _CHANNEL}
        if (algorithm := settings.get("quant_algo")) not in known:
            raise Unsupported(f"its weights are quantised by modelopt {algorithm}")
        return [known[algorithm]]
    if method == "compressed-tensors":
        return _blocks_of_schemes(settings)
    return None


def _blocks_of_schemes(settings: Mapping[str, Any]) -> list[Block] | None:
    groups = list((settings.get("config_groups") or {}).values())
    formats = {group.get("format") or settings.get("format") for group in groups}
    if not formats & _COMPRESSED:
        return None
    kinds = [group["weights"] for group in groups]
    for what, is_known in (
        (f"in {' and '.join(sorted(map(str, formats)))}", formats <= _COMPRESSED),
        ("not as 8-bit floating point", all(k.get("type") == "float" and k.get("num_bits") == 8 for k in kinds)),
        ("not symmetric around 0", all(kind.get("symmetric", True) for kind in kinds)),
        ("transformed", not settings.get("transform_config")),
        ("sparse", (settings.get("sparsity_config") or {}).get("format", "dense") == "dense"),
    ):
        if not is_known:
            raise Unsupported(f"its weights are quantised by compressed-tensors, {what}")
    return [_of_strategy(kind) for kind in kinds]


def _of_strategy(weights: Mapping[str, Any]) -> Block:
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return _TENSOR
    if strategy == "channel":
        return _CHANNEL
    if strategy == "block":
        return _block(weights["block_structure"])
    if strategy == "group":
        return _block((1, weights["group_size"]))
    raise Unsupported(f"its weights are quantised by compressed-tensors, by {strategy}")


def _block(size: Sequence[Any]) -> Block:
    outputs, inputs = size
    if not all(isinstance(each, int) and each > 0 for each in size):
        raise TypeError(f"a block of {size}")
    return Block(outputs, inputs)


def is_of_quantised(name: str) -> bool:
    """Whether a tensor of this name is needed to dequantise a weight."""
    return _OF_WEIGHTS.fullmatch(name.rpartition(".")[2]) is not None


def check_types(folder: Path, types: Mapping[str, str]) -> None:
    """Check that no tensor has a type that only makes sense with a scale.

    Raises:
        Unsupported: one does.
    """
    for name, type_ in types.items():
        if type_.startswith(("F8", "F6", "F4")) and type_ != "F64":
            raise Unsupported(f"{name} in {folder} is of type {type_}, and its config does not describe that format")


def _read(numbers: torch.Tensor) -> torch.Tensor:
    """Convert numbers in e4m3 to floats, by a table that is several times as fast as torch's own conversion."""
    bits = numbers.view(torch.uint8).flatten().numpy()
    floats = np.empty(bits.size, np.float32)
    for begin in range(0, bits.size, _RUN):
        run = slice(begin, begin + _RUN)
        np.take(_values(), bits[run], out=floats[run], mode="clip")  # never clips: the table has all values
    return torch.from_numpy(floats).view(numbers.shape)


@cache
def _values() -> npt.NDArray[np.float32]:
    """The values of the 256 numbers of e4m3."""
    values: npt.NDArray[np.float32] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    return values


def _scale(weights: torch.Tensor, scales: torch.Tensor, block: Block) -> None:
    """Multiply weights [..., outputs, inputs] in place by scales [..., output blocks, input blocks]."""
    if weights.dim() > 2:
        for each, own in zip(weights, scales, strict=True):
            _scale(each, own, block)
        return
    num_outputs, num_inputs = weights.shape
    size = block.outputs or num_outputs
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(block.inputs or num_inputs, dim=1)[:, :num_inputs]
    num_whole = num_outputs // size  # whole blocks; the last block may have fewer outputs
    whole, rest = weights[: num_whole * size], weights[num_whole * size :]
    whole.view(num_whole, size, num_inputs).mul_(scales[:num_whole, None])
    rest.mul_(scales[num_whole:])
