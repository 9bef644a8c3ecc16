"""The matrices by which each head maps its queries to latents, and latents to its values."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...kernels.matrix import COLUMNS, FourBits, Packer, Placement, matrix_bytes, new_matrix
from ...kernels.memory import Arena
from ...kernels.structures import LANES, Format, LatentLayer, LatentShape, Matrix
from ..spec.decoder import Unsupported
from ..spec.latent import LatentSpec

if TYPE_CHECKING:
    from ..checkpoint.mapped import Checkpoint


def check_latents(latent: LatentSpec, *, rotary_dim: int) -> None:
    """
    Raises:
        Unsupported: the kernels have no latents of these sizes, see kernels/src/latents.h.
    """
    if rotary_dim != latent.rotary_dim:
        raise Unsupported(
            f"its positions turn {rotary_dim} channels, and its latents have {latent.rotary_dim} for them"
        )
    for name, size, multiple in (
        ("latents", latent.rank, COLUMNS),
        ("latents of queries", latent.query_rank, COLUMNS),
        ("values", latent.value_dim, COLUMNS),
        ("plain keys", latent.plain_dim, LANES),
        ("turned keys", latent.rotary_dim, LANES),
    ):
        if size % multiple:
            raise Unsupported(f"its {name} have {size} channels, which is not a multiple of {multiple}")


def latent_shape(latent: LatentSpec | None) -> LatentShape:
    if latent is None:
        return LatentShape()
    return LatentShape(latent.rank, latent.query_rank, latent.plain_dim, latent.value_dim, latent.norm_eps)


def head_bytes(latent: LatentSpec, format_: Format, num_heads: int) -> int:
    """The most that ``HeadMatrices`` take from an arena."""
    key = matrix_bytes(format_, latent.plain_dim, latent.rank)
    return num_heads * (key + matrix_bytes(format_, latent.rank, latent.value_dim))


def whole_matrix(checkpoint: Checkpoint, name: str, packer: Packer) -> torch.Tensor:
    """A matrix as plain numbers, even if it is stored in four bits."""
    if not checkpoint.has_four_bits(name):
        return checkpoint[name]
    stored = checkpoint.four_bits(name)
    assert isinstance(stored, FourBits), "experts alone are stored otherwise"
    num_outputs, num_inputs = checkpoint.shapes()[name]
    format_ = checkpoint.quantised_format
    assert format_ is not None, "it has weights in four bits"
    arena = Arena(matrix_bytes(format_, num_inputs, num_outputs))
    matrix = new_matrix(arena, format_, num_inputs, num_outputs, has_bias=False)
    place = Placement(matrix, num_outputs, 0, COLUMNS)
    packer.pack_int4(stored, place)
    return torch.from_numpy(packer.unpack(place))


class HeadMatrices:
    """One tensor of a layer, packed as two matrices per head."""

    def __init__(self, latent: LatentSpec, num_heads: int, arena: Arena, packer: Packer, format_: Format) -> None:
        plain, of_value, rank = latent.plain_dim, latent.value_dim, latent.rank
        self._plain_dim, self._packer = plain, packer
        self.keys, self.values = (Matrix * num_heads)(), (Matrix * num_heads)()
        for number in range(num_heads):
            self.keys[number] = new_matrix(arena, format_, plain, rank, has_bias=False)
            self.values[number] = new_matrix(arena, format_, rank, of_value, has_bias=False)
        self._places = [
            (Placement(key, rank, 0, COLUMNS), Placement(value, of_value, 0, COLUMNS))
            for key, value in zip(self.keys, self.values, strict=True)
        ]

    def pack(self, weight: torch.Tensor) -> None:
        """``weight`` [heads * (plain channels + value channels), rank] is of a type that the kernels read."""
        is_bf16, plain = weight.dtype == torch.bfloat16, self._plain_dim
        for head, places in zip(weight.chunk(len(self._places)), self._places, strict=True):
            for part, place in zip((head[:plain].T.contiguous(), head[plain:]), places, strict=True):
                self._packer.pack(part.data_ptr(), place, is_bf16=is_bf16)

    def attach(self, layer: LatentLayer) -> None:
        layer.key_ups, layer.value_ups = ctypes.addressof(self.keys), ctypes.addressof(self.values)

    def weight(self) -> torch.Tensor:
        """The tensor with the packed values, float32."""
        parts = [
            part for key, value in self._places for part in (self._packer.unpack(key).T, self._packer.unpack(value))
        ]
        return torch.from_numpy(np.concatenate(parts))
