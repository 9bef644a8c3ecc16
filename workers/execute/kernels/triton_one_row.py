"""Matrix products of one row, at the speed at which memory yields the weights, with what lies between them.

A library computes one row with tiles for sixteen or more, and adds up parts of its sums in a kernel of its own. Here
each program reads some rows of the weights in one go, and finishes their outputs.

Axes: K inputs, N outputs; of experts, E in all and M of them chosen by the token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sizes import cdiv, next_power_of_2
from .triton_experts import Choices
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
def _one_row(x, weight, scales, bias, norm, residual, experts, output, N, eps, multiplier,
             K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_SCALED: tl.constexpr,
             NORMS: tl.constexpr, GATES: tl.constexpr, IS_GELU: tl.constexpr, HAS_BIAS: tl.constexpr,
             ADDS: tl.constexpr, CHOOSES: tl.constexpr):  # fmt: skip
    """One program computes some outputs. The norm's root is a factor of the sums, which need not wait for it, and so is
    the scale of an output's weights.
    """
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_output, is_input = n < N, k < K
    is_weight = is_output[:, None] & is_input[None, :]
    if CHOOSES:
        choice = tl.program_id(1)
        weight += tl.load(experts + choice).to(tl.int64) * (2 if GATES else 1) * N * K
        output += choice * N
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
    experts: torch.Tensor | None = None,
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

    With ``experts`` int32 [1, M], the weights are [E, N, K], without biases or scales: [M, N], or [M, N / 2], of those
    that are named.
    """
    num_inputs, num_outputs = x.shape[1], weight.shape[-2] if activation is None else weight.shape[-2] // 2
    num_rows = 1 if experts is None else experts.numel()
    output = x.new_empty(num_rows, num_outputs, dtype=dtype or x.dtype) if residual is None else residual
    tile = one_row_tile(num_rows * num_outputs, num_inputs, weight.itemsize, gates=activation is not None)
    _one_row[cdiv(num_outputs, tile.num_outputs), num_rows](
        x, weight, x if scales is None else scales, x if bias is None else bias, x if norm is None else norm, output,
        x if experts is None else experts, output, num_outputs, eps, multiplier,
        K=num_inputs, BLOCK_N=tile.num_outputs, BLOCK_K=next_power_of_2(num_inputs), IS_SCALED=scales is not None,
        NORMS=norm is not None, GATES=activation is not None, IS_GELU=activation == "gelu_tanh",
        HAS_BIAS=bias is not None, ADDS=residual is not None, CHOOSES=experts is not None, num_warps=tile.num_warps,
    )  # fmt: skip
    return output


@triton.jit
def _add_chosen(x, matrices, experts, weights, residual, N, multiplier, NUM: tl.constexpr, PADDED: tl.constexpr,
                K: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """One program computes one of the N outputs, a sum over the ``NUM`` choices and their K channels."""
    n = tl.program_id(0)
    i, k = tl.arange(0, PADDED), tl.arange(0, BLOCK_K)
    is_choice = i < NUM
    is_input = is_choice[:, None] & (k < K)[None, :]
    expert = tl.load(experts + i, mask=is_choice, other=0).to(tl.int64)
    tile = matrices + (expert * N + n)[:, None] * K + k[None, :]
    products = tl.load(tile, mask=is_input, other=0.0, eviction_policy="evict_first").to(tl.float32)
    products *= tl.load(x + i[:, None] * K + k[None, :], mask=is_input, other=0.0).to(tl.float32)
    scales = tl.load(weights + i, mask=is_choice, other=0.0)
    total = tl.sum(tl.sum(products, 1) * scales, 0) * multiplier + tl.load(residual + n).to(tl.float32)
    tl.store(residual + n, total.to(residual.dtype.element_ty))


def fits_one_row(num_chosen: int, num_channels: int) -> bool:
    """Whether a program can hold what one output of ``add_chosen`` is computed from."""
    return next_power_of_2(num_chosen) * next_power_of_2(num_channels) <= MAX_INPUTS


def add_chosen(
    x: torch.Tensor, matrices: torch.Tensor, chosen: Choices, *, residual: torch.Tensor, multiplier: float = 1.0
) -> None:
    """Add to ``residual`` [1, N] ``multiplier`` times the sum of x [M, K], each row times the matrix of its expert out
    of ``matrices`` [E, N, K] and the weight of the choice.
    """
    num_chosen, num_inputs = x.shape
    padded, block = next_power_of_2(num_chosen), next_power_of_2(num_inputs)
    num_warps = max(1, min(_MAX_WARPS, padded * block * matrices.itemsize // (32 * _THREAD_BYTES)))
    _add_chosen[(residual.shape[1],)](
        x, matrices, chosen.experts, chosen.weights, residual, residual.shape[1], multiplier, NUM=num_chosen,
        PADDED=padded, K=num_inputs, BLOCK_K=block, num_warps=num_warps,
    )  # fmt: skip
