"""How GPTQ, AWQ, AutoRound and compressed-tensors store weights in four bits, by their quantization_config.

Sources: the packing of AutoGPTQ, of AutoAWQ's GEMM kernels, of AutoRound, which has both, and "pack-quantized" of
compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from .....protocol.errors import ConfigError
from ...kernels.structures import Format
from ..spec.decoder import Unsupported

Array = npt.NDArray[Any]

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position in its word of each of eight outputs
_GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # stored zeros are smaller by this
_ROUNDED = {  # what AutoRound calls the layouts of others
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:gptq": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:awq": "awq",
    "auto_round:auto_awq": "awq",
}
BITS = 4


class Stored(NamedTuple):
    """What a quantization_config says about the weights."""

    layout: Layout
    group_size: int  # inputs; -1: all
    has_exceptions: bool  # some matrices have another number of bits, or another group size


class Weights(NamedTuple):
    """The unpacked weights of one linear layer."""

    numbers: npt.NDArray[np.uint8]  # [outputs, inputs]
    scales: Array  # [outputs, groups]
    zeros: Array  # [outputs, groups]
    group_of: Array | None  # [inputs], the group of each input; None if not stored


class Layout:
    """How one of these tools stores a linear layer."""

    parts: tuple[str, ...]  # required tensors, numbers first
    optional: ClassVar[tuple[str, ...]] = ()
    is_reordered = False  # according to the config; then the group of each input must be stored

    @property
    def all_parts(self) -> tuple[str, ...]:
        return self.parts + self.optional

    def shape(self, packed: tuple[int, ...], bits: int) -> tuple[int, int]:
        """Return [outputs, inputs] of numbers that are packed in this shape."""
        raise NotImplementedError

    def bits(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Array | None]) -> int:
        """The bits of each number in tensors of these shapes, of which ``read`` reads one."""
        (_, num_words), (_, num_outputs) = shapes["qzeros"], shapes["scales"]
        return 32 * num_words // num_outputs

    def num_groups(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return shapes["scales"][0]

    def read(self, parts: Mapping[str, Array], bits: int) -> Weights:
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

    def shape(self, packed: tuple[int, ...], bits: int) -> tuple[int, int]:
        return packed[1], packed[0] * 32 // bits

    def read(self, parts: Mapping[str, Array], bits: int) -> Weights:
        zeros = _unpacked(parts["qzeros"], bits).T + self._zero_offset & (1 << bits) - 1
        numbers = _unpacked(parts["qweight"].T, bits)
        return Weights(numbers, parts["scales"].T, zeros.astype(np.float32), parts.get("g_idx"))


class _Awq(Layout):
    parts = ("qweight", "qzeros", "scales")

    def shape(self, packed: tuple[int, ...], bits: int) -> tuple[int, int]:
        return packed[1] * 32 // bits, packed[0]

    def read(self, parts: Mapping[str, Array], bits: int) -> Weights:
        if bits != BITS:
            raise Unsupported(f"some of its weights have {bits} bits, which awq has no usual order for")
        numbers, zeros = (_unpacked(parts[name], bits, _AWQ_ORDER).T for name in ("qweight", "qzeros"))
        return Weights(np.ascontiguousarray(numbers), parts["scales"].T, zeros.astype(np.float32), None)


class _PackQuantized(Layout):
    optional = ("weight_zero_point", "weight_g_idx", "weight_shape")

    def __init__(self, *, is_symmetric: bool, is_reordered: bool) -> None:
        self.parts = ("weight_packed", "weight_scale", *(() if is_symmetric else ("weight_zero_point",)))
        self.is_reordered = is_reordered

    def shape(self, packed: tuple[int, ...], bits: int) -> tuple[int, int]:
        return packed[0], packed[1] * 32 // bits

    def bits(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Array | None]) -> int:
        shape = read("weight_shape")
        if shape is None or shape.shape != (2,) or not shape[1]:
            raise Unsupported("its layers are quantised by several schemes, and it does not have their shapes")
        return int(32 * shapes["weight_packed"][1] // shape[1])

    def num_groups(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return shapes["weight_scale"][1]

    def read(self, parts: Mapping[str, Array], bits: int) -> Weights:
        numbers, scales = _unpacked(parts["weight_packed"], bits), parts["weight_scale"]
        zeros = np.full_like(scales, 1 << bits - 1)
        if "weight_zero_point" in parts:
            unpacked = _unpacked(parts["weight_zero_point"].T, bits).T
            num_lacking = -len(numbers) % (32 // bits)  # outputs missing from the last word
            zeros = unpacked[: len(unpacked) - num_lacking].astype(np.float32)
        return Weights(numbers, scales, zeros, parts.get("weight_g_idx"))


def find_layout(settings: Mapping[str, Any]) -> Stored:
    """Return what the quantization_config says about the weights.

    Raises:
        Unsupported: they are quantised in a way that is not supported here.
    """
    method = settings.get("quant_method")
    bits, group_size = settings.get("bits"), settings.get("group_size")
    layout: Layout
    if method == "auto-round":
        layout = _of_rounding(settings)
    elif method == "gptq":
        version = str(settings.get("checkpoint_format") or "gptq")
        layout = _Gptq(version, is_reordered=bool(settings.get("desc_act")))
    elif method == "awq" and _version(settings) == "gemm":
        layout = _Awq()
    elif method == "compressed-tensors" and settings.get("format") == "pack-quantized":
        layout, bits, group_size = _of_scheme(settings)
    else:
        kind = _version(settings) if method == "awq" else settings.get("format") or settings.get("version") or ""
        raise Unsupported(f"its weights are quantised by {method} {kind}".rstrip())
    if bits != BITS:
        raise Unsupported(f"its weights have {bits!r} bits, the kernels support {BITS}")
    least = Format.FINE_INT4.group_inputs
    if not isinstance(group_size, int) or (group_size != -1 and (group_size < 1 or group_size % least)):
        raise Unsupported(f"its weights are in groups of {group_size!r} inputs, which is not a multiple of {least}")
    has_exceptions = bool(settings.get("dynamic") or settings.get("extra_config")) or len(_schemes(settings)) > 1
    return Stored(layout, group_size, has_exceptions)


def _version(settings: Mapping[str, Any]) -> str:
    """Of the layout of AWQ; AutoAWQ and GPTQModel have different names for it."""
    named = (settings.get(name) for name in ("version", "checkpoint_format", "format"))
    return str(next((name for name in named if name), "gemm")).lower()


def _of_rounding(settings: Mapping[str, Any]) -> Layout:
    """Return the layout of weights that AutoRound has quantised."""
    packing, kind = settings.get("packing_format"), settings.get("data_type", "int")
    if packing not in _ROUNDED or kind != "int":
        raise Unsupported(f"its weights are quantised by auto-round {packing} {kind}")
    if (settings.get("act_bits") or 16) < 16 or settings.get("rotation_config"):
        raise Unsupported("auto-round has quantised its activations or rotated its weights")
    layout = _ROUNDED[packing]
    return _Awq() if layout == "awq" else _Gptq(layout, is_reordered=False)


def _schemes(settings: Mapping[str, Any]) -> list[Any]:
    return list((settings.get("config_groups") or {}).values())


def _of_scheme(settings: Mapping[str, Any]) -> tuple[Layout, Any, Any]:
    """Return the layout, and bits and group size of the first scheme with four bits."""
    schemes = _schemes(settings)
    if (
        not schemes
        or any(scheme.get(name) for scheme in schemes for name in ("input_activations", "output_activations"))
        or any(scheme["weights"].get("type") != "int" for scheme in schemes)
    ):
        raise Unsupported("its layers are not quantised to integers, or not only in their weights")
    if settings.get("transform_config"):
        raise Unsupported("its activations are transformed before they are multiplied by its weights")
    kinds = [scheme["weights"] for scheme in schemes]
    weights = next((kind for kind in kinds if kind.get("num_bits") == BITS), kinds[0])
    layout = _PackQuantized(
        is_symmetric=any(kind.get("symmetric", True) for kind in kinds),
        is_reordered=any(kind.get("actorder") in ("group", "dynamic", True) for kind in kinds),
    )
    return layout, weights.get("num_bits"), -1 if weights.get("strategy") == "channel" else weights.get("group_size")


def _unpacked(words: Array, bits: int, places: tuple[int, ...] | None = None) -> npt.NDArray[np.uint8]:
    """Unpack [..., n] words to [..., 32 / bits * n] numbers; ``places`` are their positions in a word."""
    if words.dtype != np.int32:
        raise ConfigError(f"its {bits}-bit weights are packed into {words.dtype}, not int32", param="model")
    stored = np.ascontiguousarray(words).view(np.uint32)
    places = places or tuple(range(32 // bits))
    numbers = np.empty((*stored.shape, len(places)), np.uint8)
    for index, place in enumerate(places):
        numbers[..., index] = stored >> np.uint32(bits * place) & np.uint32((1 << bits) - 1)
    return numbers.reshape(*stored.shape[:-1], -1)
