"""Matrix products of one row, at the speed at which memory yields the weights, with what lies between them.

A library computes one row with tiles for sixteen or more, and adds up parts of its sums in a kernel of its own. Here
each program reads some rows of the weights in one go, and finishes their outputs.

Axes: K inputs, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sizes import cdiv, next_power_of_2
from .triton_rows import gated

MAX_INPUTS = 32768  # a program holds whole rows of the weights in its registers
_THREAD_BYTES = 128  # of weights: eight loads at once, and registers for four programs of eight warps on a processor
_WARP_BYTES = 512  # of a row of weights, which it reads in one go
_OF_EIGHT_BITS = 2  # times as much: as an element costs more than its byte, fewer programs should find the norm
_MAX_WARPS = 8
_MIN_PROGRAMS = 264  # two for each processor of a large GPU, unless they had too little to do
_MIN_BYTES = 4096


class OneRowTile(NamedTuple):
    """Rows of weights that a program holds, of gates and of others each, and its warps."""

    num_outputs: int
    num_warps: int


def one_row_tile(num_outputs: int, num_inputs: int, itemsize: int, *, gates: bool) -> OneRowTile:
    """All warps share each row of the weights, so that none reads the same inputs as another."""
    row_bytes, factor = next_power_of_2(num_inputs) * itemsize, _OF_EIGHT_BITS if itemsize == 1 else 1
    num_warps = max(1, min(_MAX_WARPS, row_bytes // (factor * _WARP_BYTES)))
    rows = max(1, num_warps * 32 * factor * _THREAD_BYTES // row_bytes // (2 if gates else 1))
    while rows > 1 and cdiv(num_outputs, rows) < _MIN_PROGRAMS and rows * row_bytes > _MIN_BYTES:
        rows //= 2
    return OneRowTile(rows, num_warps)


@triton.jit
def _one_row(x, weight, scales, bias, norm, residual, output, N, eps, multiplier,
             K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_SCALED: tl.constexpr,
             NORMS: tl.constexpr, GATES: tl.constexpr, IS_GELU: tl.constexpr, HAS_BIAS: tl.constexpr,
             ADDS: tl.constexpr):  # fmt: skip
    """One program computes some outputs. The norm's root is a factor of the sums, which need not wait for it, and so is
    the scale of an output's weights.
    """
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_output, is_input = n < N, k < K
    is_weight = is_output[:, None] & is_input[None, :]
    tile = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    # All loads come before what is computed from the first.
    weights = tl.load(tile, mask=is_weight, other=0.0, eviction_policy="evict_first")
    up_weights = weights
    if GATES:
        up_tile = weight + (n + N).to(tl.int64)[:, None] * K + k[None, :]
        up_weights = tl.load(up_tile, mask=is_weight, other=0.0, eviction_policy="evict_first")
    row = tl.load(x + k, mask=is_input, other=0.0).to(tl.float32)
    if ADDS:
        old = tl.load(residual + n, mask=is_output, other=0.0).to(tl.float32)
    size = 1.0
    if NORMS:
        size = tl.rsqrt(tl.sum(row * row, 0) / K + eps)
        row *= tl.load(norm + k, mask=is_input, other=0.0).to(tl.float32)
    total = tl.sum(weights.to(tl.float32) * row[None, :], 1) * size
    if IS_SCALED:
        total *= tl.load(scales + n, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
    if GATES:
        up = tl.sum(up_weights.to(tl.float32) * row[None, :], 1) * size
        if IS_SCALED:
            up *= tl.load(scales + N + n, mask=is_output, other=0.0)
        if HAS_BIAS:
            up += tl.load(bias + N + n, mask=is_output, other=0.0).to(tl.float32)
        total = gated(total, up, IS_GELU)
    if ADDS:
        total = total * multiplier + old
    tl.store(output + n, total.to(output.dtype.element_ty), mask=is_output)


def one_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    multiplier: float = 1.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias`` [1, N] of x [1, K] and weight [N, K], in ``dtype`` or that of x.

    With ``scales`` float32 [N, 1], the weights are in fp8, times the scale of each output; x is not rounded. With
    ``norm`` [K], of the RMS norm of x. With ``activation``, which is "silu" or "gelu_tanh", the weights are those of
    gates and of as many others, by which activated gates are multiplied: [1, N / 2]. With ``residual`` [1, N], returns
    ``residual + multiplier * product``, stored in ``residual``.
    """
    num_inputs, num_outputs = x.shape[1], len(weight) if activation is None else len(weight) // 2
    output = x.new_empty(1, num_outputs, dtype=dtype or x.dtype) if residual is None else residual
    tile = one_row_tile(num_outputs, num_inputs, weight.itemsize, gates=activation is not None)
    _one_row[(cdiv(num_outputs, tile.num_outputs),)](
        x, weight, x if scales is None else scales, x if bias is None else bias, x if norm is None else norm, output,
        output, num_outputs, eps, multiplier,
        K=num_inputs, BLOCK_N=tile.num_outputs, BLOCK_K=next_power_of_2(num_inputs), IS_SCALED=scales is not None,
        NORMS=norm is not None, GATES=activation is not None, IS_GELU=activation == "gelu_tanh",
        HAS_BIAS=bias is not None, ADDS=residual is not None, num_warps=tile.num_warps,
    )  # fmt: skip
    return output
