"""Packed matrices: their sizes, how a checkpoint's tensors are packed into them, and how to unpack them."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .memory import Arena, padded
from .structures import Format, Matrix

COLUMNS = 64  # in a block
_PIECES_PER_THREAD = 4  # so that all threads finish at about the same time
_NO_MEMORY = "no memory for 16 rows of {} weights in float32 while packing them"  # a strip, see src/pack.h
_FEW_WEIGHTS = 1 << 18  # packed by one thread before another has started


def matrix_bytes(format_: Format, num_inputs: int, num_outputs: int) -> int:
    """The most that ``new_matrix`` takes from an arena."""
    columns = padded(num_outputs)
    return columns * format_.steps(num_inputs) * 4 + 3 * padded(4 * columns)


def new_matrix(arena: Arena, format_: Format, num_inputs: int, num_outputs: int, *, has_bias: bool) -> Matrix:
    """A matrix of zeros."""
    columns = padded(num_outputs)

    def per_column(wanted: bool) -> int | None:
        return arena.take(4 * columns).ctypes.data if wanted else None

    return Matrix(
        blocks=arena.take(columns * format_.steps(num_inputs) * 4).ctypes.data,
        bias=per_column(has_bias),
        scales=per_column(format_ is Format.INT8),
        offsets=per_column(format_ is Format.INT8),
        num_inputs=num_inputs,
        num_blocks=columns // COLUMNS,
        format=format_,
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """The columns of a matrix that a tensor's rows become, see ``Placement`` in ``src/pack.h``."""

    matrix: Matrix
    num_outputs: int
    first: int = 0
    run: int = COLUMNS


class FourBits(NamedTuple):
    """Weights ``scale * number + least``, with a scale and a least value per 64 or 32 inputs of an output."""

    numbers: npt.NDArray[np.uint8]  # [num_outputs, num_inputs] of 0..15
    scales: npt.NDArray[np.float32]  # [num_outputs, ceil(num_inputs / 64)], or 32; rounded to bfloat16 when packed
    least: npt.NDArray[np.float32]  # likewise

    def floats(self, format_: Format) -> npt.NDArray[np.float32]:
        """The weights, [num_outputs, num_inputs]."""
        group = np.arange(self.numbers.shape[1]) // format_.group_inputs
        return self.scales[:, group] * self.numbers + self.least[:, group]


class Mxfp4(NamedTuple):
    """Weights ``value * 2 ** (scale - 127)``, with one of 16 E2M1 values, and a scale per 32 inputs of an output.

    Source: "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.
    """

    numbers: npt.NDArray[np.uint8]  # [num_outputs, num_inputs / 2], the first of two inputs in the low nibble
    scales: npt.NDArray[np.uint8]  # [num_outputs, num_inputs / 32]; 255: the weights are NaN


class Packer:
    """Packs weights on all threads."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._library = library
        self._num_threads = num_threads

    def pack(
        self, source: int, place: Placement, *, is_bf16: bool, importance: npt.NDArray[np.float32] | None = None
    ) -> None:
        """Packs the weights at address ``source``, [num_outputs, num_inputs] in bfloat16 or float32.

        In four bits, the square of the error of each input's weights counts as many times as its ``importance`` says,
        [num_inputs]; None: all count alike.

        Raises:
            MemoryError: there is not enough memory to transform rows for eight bits.
        """
        address = None if importance is None else importance.ctypes.data
        num_inputs = place.matrix.num_inputs

        def pack_piece(begin: int, end: int) -> None:
            piece = place.first, place.run, begin, end
            if self._library.triptych_pack(place.matrix, source, is_bf16, address, *piece):
                raise MemoryError(_NO_MEMORY.format(num_inputs))

        self._in_pieces(place, pack_piece)

    def pack_int4(self, source: FourBits, place: Placement) -> None:
        """Packs weights that are already in four bits."""
        numbers, scales, least = map(np.ascontiguousarray, source)

        def pack_piece(begin: int, end: int) -> None:
            self._library.triptych_pack_int4(
                place.matrix, numbers.ctypes.data, scales.ctypes.data, least.ctypes.data,
                place.first, place.run, begin, end,
            )  # fmt: skip

        self._in_pieces(place, pack_piece)

    def pack_mxfp4(self, source: Mxfp4, place: Placement) -> None:
        """Packs MXFP4 weights."""
        numbers, scales = map(np.ascontiguousarray, source)

        def pack_piece(begin: int, end: int) -> None:
            self._library.triptych_pack_mxfp4(
                place.matrix, numbers.ctypes.data, scales.ctypes.data, place.first, place.run, begin, end
            )

        self._in_pieces(place, pack_piece)

    def pack_screen(self, source: int, place: Placement, limits: npt.NDArray[np.float32], *, is_bf16: bool) -> None:
        """Packs the head at address ``source`` in eight bits, and finds ``Screen.limits``.

        Raises:
            MemoryError: there is not enough memory to transform rows.
        """

        def pack_piece(begin: int, end: int) -> None:
            if self._library.triptych_pack_screen(place.matrix, source, is_bf16, begin, end, limits.ctypes.data):
                raise MemoryError(_NO_MEMORY.format(place.matrix.num_inputs))

        self._in_pieces(place, pack_piece)

    def unpack(self, place: Placement) -> npt.NDArray[np.float32]:
        """Dequantises weights, to [num_outputs, num_inputs]."""
        weights = np.empty((place.num_outputs, place.matrix.num_inputs), np.float32)

        def unpack_piece(begin: int, end: int) -> None:
            self._library.triptych_unpack(place.matrix, weights.ctypes.data, place.first, place.run, begin, end)

        self._in_pieces(place, unpack_piece)
        return weights

    def _in_pieces(self, place: Placement, run: Callable[[int, int], None]) -> None:
        count = place.num_outputs
        if count * place.matrix.num_inputs < _FEW_WEIGHTS:
            run(0, count)
            return
        piece = padded(-(-count // (_PIECES_PER_THREAD * self._num_threads)), COLUMNS)
        with ThreadPoolExecutor(self._num_threads) as pool:
            deque(pool.map(lambda begin: run(begin, min(begin + piece, count)), range(0, count, piece)), maxlen=0)
