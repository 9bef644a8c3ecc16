"""The matrix products of one token's experts, at the speed at which memory yields their weights.

Like ``triton_one_row``, in two launches: the gates of all chosen experts, and the sum of what they yield. Nothing is
sorted, and no row of a matrix instruction is computed for nobody.

Axes: E experts, K of them chosen, C channels of the hidden state, I channels inside an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .sizes import cdiv, next_power_of_2
from .triton_experts import Choices
from .triton_one_row import MAX_INPUTS, one_row_tile
from .triton_rows import gated

_WARP_BYTES = 4096  # of weights that a warp holds: 128 for each thread, as in ``triton_one_row``
_MAX_WARPS = 8


@triton.jit
def _gate_chosen(x, norm, matrices, experts, output, N, eps, K: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_K: tl.constexpr, NORMS: tl.constexpr, IS_GELU: tl.constexpr):  # fmt: skip
    """One program computes some of the N activated products of one choice, of K inputs each. The norm's root is a
    factor of the sums.
    """
    choice = tl.program_id(1)
    expert = tl.load(experts + choice).to(tl.int64)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_output, is_input = n < N, k < K
    is_weight = is_output[:, None] & is_input[None, :]
    tile = matrices + (expert * 2 * N + n)[:, None] * K + k[None, :]
    # All loads come before what is computed from the first.
    gates = tl.load(tile, mask=is_weight, other=0.0, eviction_policy="evict_first")
    ups = tl.load(tile + N * K, mask=is_weight, other=0.0, eviction_policy="evict_first")
    row = tl.load(x + k, mask=is_input, other=0.0).to(tl.float32)
    size = 1.0
    if NORMS:
        size = tl.rsqrt(tl.sum(row * row, 0) / K + eps)
        row *= tl.load(norm + k, mask=is_input, other=0.0).to(tl.float32)
    gate = tl.sum(gates.to(tl.float32) * row[None, :], 1) * size
    up = tl.sum(ups.to(tl.float32) * row[None, :], 1) * size
    tl.store(output + choice * N + n, gated(gate, up, IS_GELU).to(output.dtype.element_ty), mask=is_output)


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


def gate_chosen(
    x: torch.Tensor,
    matrices: torch.Tensor,
    experts: torch.Tensor,
    *,
    norm: torch.Tensor | None,
    eps: float,
    activation: str,
) -> torch.Tensor:
    """Gated products [K, I] of one token x [1, C], or of its RMS norm with the weights ``norm`` [C], with those
    ``matrices`` [E, 2 I, C] that ``experts`` int32 [1, K] names: activated gates times as many others.
    """
    num_chosen, num_inputs, num_outputs = experts.numel(), x.shape[1], matrices.shape[1] // 2
    output = x.new_empty(num_chosen, num_outputs)
    tile = one_row_tile(num_chosen * num_outputs, num_inputs, matrices.itemsize, gates=True)
    _gate_chosen[cdiv(num_outputs, tile.num_outputs), num_chosen](
        x, x if norm is None else norm, matrices, experts, output, num_outputs, eps,
        K=num_inputs, BLOCK_N=tile.num_outputs, BLOCK_K=next_power_of_2(num_inputs), NORMS=norm is not None,
        IS_GELU=activation == "gelu_tanh", num_warps=tile.num_warps,
    )  # fmt: skip
    return output


def add_chosen(
    x: torch.Tensor, matrices: torch.Tensor, chosen: Choices, *, residual: torch.Tensor, multiplier: float = 1.0
) -> None:
    """Add to ``residual`` [1, C] ``multiplier`` times the sum of x [K, I], each row times the matrix of its expert out
    of ``matrices`` [E, C, I] and the weight of the choice.
    """
    num_chosen, num_inputs = x.shape
    padded, block = next_power_of_2(num_chosen), next_power_of_2(num_inputs)
    num_bytes = padded * block * matrices.itemsize
    _add_chosen[(residual.shape[1],)](
        x, matrices, chosen.experts, chosen.weights, residual, residual.shape[1], multiplier, NUM=num_chosen,
        PADDED=padded, K=num_inputs, BLOCK_K=block, num_warps=max(1, min(_MAX_WARPS, num_bytes // _WARP_BYTES)),
    )  # fmt: skip
