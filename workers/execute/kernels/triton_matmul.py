"""A matrix product whose rows do not depend on the number of rows.

A library chooses tiles and split-K by the number of rows, so a row's rounding depends on the rest of its batch. Here
the columns of a tile and the order of summation depend only on the shape of the weights. The rows of a tile do depend
on the number of rows, but that changes no bits: 128 are computed by twice as many warps as 64, with the same matrix
instructions (on Hopper, wgmma of 64 rows and as many columns as the tile has) in the same order.

Axes: M rows, K inputs, N outputs.

Source: "Defeating Nondeterminism in LLM Inference", He and Thinking Machines Lab, 2025.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sizes import cdiv

_INPUTS = 64  # per loop iteration
_WIDE_FROM = 8192  # outputs from which wider tiles still keep every SM busy
_MANY_FROM = 65  # rows from which the product is bound by them; with fewer, by reading the weights


class MatmulTile(NamedTuple):
    """The tile sizes and launch parameters. Only ``num_outputs`` may change a row's bits."""

    num_rows: int
    num_outputs: int
    num_warps: int
    num_stages: int


def matmul_tile(num_rows: int, num_outputs: int, dtype: torch.dtype) -> MatmulTile:
    """A warp has 16 rows in every tile. Few rows get a deep pipeline, many rows two programs per SM."""
    rows, num_warps = (64, 4) if num_rows < _MANY_FROM else (128, 8)
    if dtype.itemsize > 2:  # no such instructions: a wider tile does not fit in the registers
        return MatmulTile(rows, 64, num_warps, 2)
    width = 128 if num_outputs >= _WIDE_FROM else 64
    if rows == 64:
        # As many stages as fit into the 99 KiB of shared memory that a program has on GPUs for workstations.
        return MatmulTile(rows, width, num_warps, 5 if width == 128 else 6)
    return MatmulTile(rows, width, num_warps, 3 if width == 128 else 4)


@triton.jit(do_not_specialize=["M"])  # or each number of rows would compile a kernel while requests wait
def _matmul(x, weight, bias, output, M, N, K, x_row, weight_row,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """One program: one output tile. Adjacent programs share columns, so that weights are read from memory once."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + m.to(tl.int64)[:, None] * x_row + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0
        )
        b = tl.load(weight + n.to(tl.int64)[None, :] * weight_row + k[:, None],
                    mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)  # fmt: skip
        total += tl.dot(a, b, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = output + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, total.to(output.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, tile: MatmulTile | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias`` [M, N] of x [M, K] and weight [N, K]; row i depends on row i of x only."""
    (num_rows, num_inputs), num_outputs = x.shape, len(weight)
    output = x.new_empty(num_rows, num_outputs)
    if num_rows:
        tile = tile or matmul_tile(num_rows, num_outputs, x.dtype)
        _matmul[cdiv(num_rows, tile.num_rows), cdiv(num_outputs, tile.num_outputs)](
            x, weight, output if bias is None else bias, output, num_rows, num_outputs, num_inputs,
            x.stride(0), weight.stride(0),
            BLOCK_M=tile.num_rows, BLOCK_N=tile.num_outputs, BLOCK_K=_INPUTS, HAS_BIAS=bias is not None,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return output
