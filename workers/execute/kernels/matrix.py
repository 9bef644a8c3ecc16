"""Packed matrices: how big they are, and how a checkpoint's tensors get into them."""

from __future__ import annotations

import ctypes
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from .memory import Arena, padded
from .structures import Format, Matrix

_COLUMNS = 64  # of a block
_PIECES_PER_THREAD = 4  # so that all end at about the same time


def matrix_bytes(format_: Format, num_inputs: int, num_outputs: int) -> int:
    """What ``new_matrix`` takes from an arena at most."""
    columns = padded(num_outputs)
    return columns * -(-num_inputs // format_.group) * 4 + 3 * padded(4 * columns)


def new_matrix(arena: Arena, format_: Format, num_inputs: int, num_outputs: int, *, has_bias: bool) -> Matrix:
    """A matrix of zeros."""
    columns = padded(num_outputs)

    def per_column(wanted: bool) -> int | None:
        return arena.take(4 * columns).ctypes.data if wanted else None

    is_quantised = format_ is Format.INT8
    return Matrix(
        blocks=arena.take(columns * -(-num_inputs // format_.group) * 4).ctypes.data,
        bias=per_column(has_bias),
        scales=per_column(is_quantised),
        offsets=per_column(is_quantised),
        num_inputs=num_inputs,
        num_blocks=columns // _COLUMNS,
    )


class Packer:
    """Packs weights on all threads. ``run`` and ``first`` are those of ``Placement`` in ``src/pack.h``."""

    def __init__(self, library: ctypes.CDLL, format_: Format, num_threads: int) -> None:
        self._library = library
        self._format = format_
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads)

    def pack(
        self, matrix: Matrix, source: int, *, num_outputs: int, is_bf16: bool, first: int = 0, run: int = _COLUMNS
    ) -> None:
        """Weights at address ``source``, [num_outputs, num_inputs] of bfloat16 or float32."""

        def pack_piece(begin: int) -> None:
            end = min(begin + piece, num_outputs)
            self._library.triptych_pack(self._format, matrix, source, is_bf16, first, run, begin, end)

        piece = padded(-(-num_outputs // (_PIECES_PER_THREAD * self._num_threads)), _COLUMNS)
        deque(self._pool.map(pack_piece, range(0, num_outputs, piece)), maxlen=0)

    def close(self) -> None:
        self._pool.shutdown()
