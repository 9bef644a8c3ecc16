"""Checkpoints that store all experts of a layer in one tensor: gpt-oss, possibly in four bits, Qwen3.5 and Granite 3.

In gpt-oss as published, experts are MXFP4 ("OCP Microscaling Formats (MX) Specification", version 1.0, 2023): four-bit
numbers, E2M1, where each 32 consecutive inputs of an output share a power of two as their scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from .....protocol.errors import ConfigError
from ...kernels.matrix import Mxfp4
from ...kernels.structures import Format
from ..spec.decoder import Unsupported
from .mapped import Checkpoint

_STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_blocks|_scales|_bias|)")
_STACK_OF_GRANITE = re.compile(r"(.*\.block_sparse_moe)\.(input|output)_linear\.weight()")
_GROUP_INPUTS = 32  # inputs that share a scale
_GROUP_BYTES = _GROUP_INPUTS // 2


class _Stack(NamedTuple):
    """What the name of a stack says."""

    experts: str  # the module
    is_down: bool
    kind: str  # "", "_bias", "_blocks" or "_scales"


def _stack(name: str) -> _Stack | None:
    if match := _STACK.fullmatch(name):
        return _Stack(match[1], match[2] == "down", match[3])
    if match := _STACK_OF_GRANITE.fullmatch(name):
        return _Stack(f"{match[1]}.experts", match[2] == "output", match[3])
    return None


class _Part(NamedTuple):
    """A tensor of one expert, as part of a stack."""

    stack: str
    expert: int
    outputs: slice
    kind: str  # "", "_bias" or "_blocks": how the stack is stored


class StackedExperts(Checkpoint):
    """Provides each expert's weights under separate names, such as ``....experts.3.up_proj.weight``, [outputs, inputs].

    In the files, a stack is [experts, inputs, outputs], and a stack of biases [experts, outputs]; gate and up outputs
    are interleaved. A stack in four bits is [experts, outputs, groups, bytes per group], with scales [experts, outputs,
    groups]. If ``by_outputs``, a stack is [experts, outputs, inputs], and all gate outputs precede the up outputs.
    """

    def __init__(self, folder: Path, *, by_outputs: bool) -> None:
        """
        Raises:
            Unsupported: a stack is of a kind that only the other order has.
            ConfigError: it has the wrong shape for its kind.
        """
        super().__init__(folder)
        self._by_outputs = by_outputs
        self._stacks = super().shapes()
        self._parts: dict[str, _Part] = {}
        for stack, shape in self._stacks.items():
            if (named := _stack(stack)) and (kind := named.kind) != "_scales":
                self._check(stack, shape, kind, folder)
                ending = "bias" if kind == "_bias" else "weight"
                for layer, outputs in self._outputs(shape[1], is_down=named.is_down).items():
                    for expert in range(shape[0]):
                        self._parts[f"{named.experts}.{expert}.{layer}.{ending}"] = _Part(stack, expert, outputs, kind)
        if any(part.kind == "_blocks" for part in self._parts.values()):
            self.quantised_format = Format.MXFP4

    def _outputs(self, num_outputs: int, *, is_down: bool) -> dict[str, slice]:
        """Linear layers in a stack, and the slices of their outputs. ``num_outputs`` matters only if ``by_outputs``."""
        if is_down:
            return {"down_proj": slice(None)}
        if self._by_outputs:
            return {"gate_proj": slice(num_outputs // 2), "up_proj": slice(num_outputs // 2, None)}
        return {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}

    def _check(self, stack: str, shape: tuple[int, ...], kind: str, folder: Path) -> None:
        text = f"{stack} in {folder} has shape {shape}"
        dimensions = {"": 3, "_bias": 2, "_blocks": 4}[kind]
        if len(shape) != dimensions or 0 in shape:
            raise ConfigError(f"{text}, which should have {dimensions} axes, none of them empty", param="model")
        if kind and self._by_outputs:
            raise Unsupported(f"it has the tensor {stack}, whose effect on its experts is unknown")
        if kind != "_blocks":
            return
        scales = stack.removesuffix("_blocks") + "_scales"
        if self._stacks.get(scales) != shape[:3] or shape[3] != _GROUP_BYTES:
            text = f"{text}, its scales {self._stacks.get(scales)}"
            raise ConfigError(f"{text}; a group has {_GROUP_BYTES} bytes and a scale", param="model")
        for name in (stack, scales):
            if self._slice(name).get_dtype() != "U8":
                raise ConfigError(f"{name} in {folder} is not of type uint8", param="model")

    def __getitem__(self, name: str) -> torch.Tensor:
        if (part := self._parts.get(name)) is None:
            return super().__getitem__(name)
        of_expert = self._of_expert(part.stack, part.expert)
        return (of_expert if part.kind == "_bias" or self._by_outputs else of_expert.T)[part.outputs]

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._stacks if _stack(name) is None)
        yield from (name for name, part in self._parts.items() if part.kind != "_blocks")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        plain = {name: shape for name, shape in self._stacks.items() if _stack(name) is None}
        return plain | {name: self._shape(part) for name, part in self._parts.items()}

    def _shape(self, part: _Part) -> tuple[int, ...]:
        shape = self._stacks[part.stack]
        num_outputs = len(range(shape[1 if part.kind or self._by_outputs else 2])[part.outputs])
        if self._by_outputs:
            return num_outputs, shape[2]
        if part.kind == "_bias":
            return (num_outputs,)
        return num_outputs, shape[2] * _GROUP_INPUTS if part.kind == "_blocks" else shape[1]

    def has_four_bits(self, name: str) -> bool:
        return name in self._parts and self._parts[name].kind == "_blocks"

    def four_bits(self, name: str) -> Mxfp4:
        part = self._parts[name]
        numbers = self._of_expert(part.stack, part.expert)[part.outputs].flatten(1)
        scales = self._of_expert(part.stack.removesuffix("_blocks") + "_scales", part.expert)[part.outputs]
        return Mxfp4(numbers.numpy(), scales.numpy())

    def _of_expert(self, stack: str, expert: int) -> torch.Tensor:
        part: torch.Tensor = self._slice(stack)[expert]
        return part
