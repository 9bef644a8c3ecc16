"""The MLP of a layer with experts: choosing experts, sorting tokens by expert, and each expert's matrix products.

A chosen expert's weights are read once for all tokens that chose it, those of other experts not at all. There is no
synchronisation with the host: launches are large enough for any choice, and surplus programs exit at once.

Axes: T tokens, E experts, K of them per token. A pair is a token and one of its choices; pair i belongs to token
``i // K``.

Source: "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", Gale et al., 2022; grouped products as in
vLLM's fused_moe.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sizes import cdiv, next_power_of_2
from .triton_matmul import MatmulTile

_INPUTS = 64  # per loop iteration of a product
_PAIRS = 1024  # per loop iteration of the sort
_FEW = 16  # rows: the fewest of a matrix instruction
_SOME, _MANY = 64, 128  # rows


class Choices(NamedTuple):
    experts: torch.Tensor  # int32 [T, K], the likeliest first
    weights: torch.Tensor  # float32 [T, K]


class SortedPairs(NamedTuple):
    """Pairs sorted by expert; those of one expert are in order."""

    order: torch.Tensor  # int32 [T * K], pairs
    ends: torch.Tensor  # int32 [E], the end of each expert's pairs in ``order``


@triton.jit
def _choose(logits, experts, weights, E: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr,
            NORMS: tl.constexpr):  # fmt: skip
    """One program chooses the experts of one token."""
    t = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, BLOCK), tl.arange(0, PADDED_K)
    x = tl.load(logits + t * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    likely = tl.exp(x - tl.max(x, 0))
    likely = tl.where(e < E, likely / tl.sum(likely, 0), -1.0)
    chosen, taken = tl.zeros([PADDED_K], tl.int32), tl.zeros([PADDED_K], tl.float32)
    for i in tl.static_range(K):
        # If all are NaN, any index found will do.
        expert = tl.minimum(tl.argmax(likely, 0), E - 1)
        weight = tl.sum(tl.where(e == expert, likely, 0.0), 0)
        chosen, taken = tl.where(k == i, expert, chosen), tl.where(k == i, weight, taken)
        likely = tl.where(e == expert, -1.0, likely)
    if NORMS:
        taken = taken / tl.sum(taken, 0)
    tl.store(experts + t * K + k, chosen, mask=k < K)
    tl.store(weights + t * K + k, taken, mask=k < K)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort(experts, order, ends, num_pairs, BLOCK: tl.constexpr):
    """One program sorts one expert: it scans all pairs twice, first to count and then to place its own."""
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    num_before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        each = tl.load(experts + start + i, mask=start + i < num_pairs, other=1 << 30)
        num_before += (each < expert).to(tl.int32)
    place = tl.sum(num_before, 0)
    for start in range(0, num_pairs, BLOCK):
        each = tl.load(experts + start + i, mask=start + i < num_pairs, other=1 << 30)
        is_own = (each == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, 0) - 1, start + i, mask=is_own > 0)
        place += tl.sum(is_own, 0)
    tl.store(ends + expert, place)


@triton.jit
def _expert_product(
    x, matrices, order, ends, scales, output, N, K, x_row, pairs_per_row,
    E: tl.constexpr, PADDED_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """One program: one output tile of one expert. Adjacent programs share columns, as in ``triton_matmul``."""
    tile = tl.program_id(0)
    e = tl.arange(0, PADDED_E)
    stops = tl.load(ends + e, mask=e < E, other=0)
    starts = tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
    num_tiles = tl.where(e < E, (stops - starts + BLOCK_M - 1) // BLOCK_M, 0)
    last_tiles = tl.cumsum(num_tiles, 0)
    expert = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    if expert >= E:
        return
    is_own = e == expert
    first = tl.sum(tl.where(is_own, starts + (tile - last_tiles + num_tiles) * BLOCK_M, 0), 0)
    place = first + tl.arange(0, BLOCK_M)
    is_row = place < tl.sum(tl.where(is_own, stops, 0), 0)
    pair = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    matrix = matrices + expert.to(tl.int64) * N * K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + (pair // pairs_per_row)[:, None] * x_row + k[None, :],
            mask=is_row[:, None] & (k < K)[None, :],
            other=0.0,
        )
        b = tl.load(matrix + n.to(tl.int64)[None, :] * K + k[:, None],
                    mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)  # fmt: skip
        total += tl.dot(a, b, input_precision="ieee")
    if HAS_SCALES:
        total *= tl.load(scales + pair, mask=is_row, other=0.0)[:, None]
    tl.store(output + pair[:, None] * N + n[None, :], total.to(output.dtype.element_ty),
             mask=is_row[:, None] & (n < N)[None, :])  # fmt: skip


@triton.jit
def _sum_pairs(parts, output, C: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    """One program sums some channels of one token."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(K):
        total += tl.load(parts + (t * K + i) * C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(output + t * C + c, total.to(output.dtype.element_ty), mask=c < C)


def choose_experts(logits: torch.Tensor, num_chosen: int, *, norms_weights: bool) -> Choices:
    """The likeliest experts by the softmax of logits [T, E]; with ``norms_weights`` their weights sum to 1."""
    num_tokens, num_experts = logits.shape
    experts = logits.new_empty(num_tokens, num_chosen, dtype=torch.int32)
    weights = logits.new_empty(num_tokens, num_chosen, dtype=torch.float32)
    if num_tokens:
        _choose[(num_tokens,)](
            logits, experts, weights, E=num_experts, BLOCK=next_power_of_2(num_experts), K=num_chosen,
            PADDED_K=next_power_of_2(num_chosen), NORMS=norms_weights, num_warps=1,
        )  # fmt: skip
    return Choices(experts, weights)


def sort_pairs(experts: torch.Tensor, num_experts: int) -> SortedPairs:
    """Sorts the pairs of experts [T, K]."""
    order = experts.new_empty(experts.numel())
    ends = experts.new_empty(num_experts)
    _sort[(num_experts,)](experts, order, ends, len(order), BLOCK=_PAIRS)
    return SortedPairs(order, ends)


def expert_tile(num_pairs: int, num_experts: int, dtype: torch.dtype, *, is_invariant: bool) -> MatmulTile:
    """A tile for the mean number of pairs per expert.

    If a row's bits must not depend on the others, all tiles use the same matrix instructions, see ``triton_matmul``.
    """
    mean = num_pairs / num_experts
    rows = _FEW if mean <= _FEW and not is_invariant else _SOME if mean <= _SOME else _MANY
    if dtype.itemsize > 2:
        return MatmulTile(min(rows, _SOME), 64, 4, 2)
    width = 128 if is_invariant or rows == _MANY else 64
    return MatmulTile(rows, width, 8 if rows == _MANY else 4, 3 if width == 128 else 4)


def expert_product(
    x: torch.Tensor, matrices: torch.Tensor, pairs: SortedPairs, tile: MatmulTile, *, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ matrix.T`` [T * K, N] for each pair, with its expert's matrix out of ``matrices`` [E, N, inputs].

    x has a row [inputs] for each token or for each pair. ``scales`` [T, K] multiply the results.
    """
    num_pairs, (num_experts, num_outputs, num_inputs) = len(pairs.order), matrices.shape
    output = x.new_empty(num_pairs, num_outputs)
    if num_pairs:
        most_tiles = min(num_pairs, (num_pairs + min(num_pairs, num_experts) * (tile.num_rows - 1)) // tile.num_rows)
        _expert_product[most_tiles, cdiv(num_outputs, tile.num_outputs)](
            x, matrices, *pairs, output if scales is None else scales, output, num_outputs, num_inputs, x.stride(0),
            num_pairs // len(x), E=num_experts, PADDED_E=next_power_of_2(num_experts),
            BLOCK_M=tile.num_rows, BLOCK_N=tile.num_outputs, BLOCK_K=_INPUTS, HAS_SCALES=scales is not None,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return output


def sum_pairs(parts: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """The sum [T, C] of the outputs of each token's experts, [T * K, C], in the order in which it chose them."""
    num_tokens, num_channels = len(parts) // num_chosen, parts.shape[1]
    output = parts.new_empty(num_tokens, num_channels)
    if num_tokens:
        block = min(1024, next_power_of_2(num_channels))
        _sum_pairs[num_tokens, cdiv(num_channels, block)](parts, output, C=num_channels, BLOCK=block, K=num_chosen)
    return output
