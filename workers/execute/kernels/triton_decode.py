"""Paged attention for one query token per sequence, split along the keys: every page is read once for all its heads.

Axes: S sequences, H query heads, J key heads, G = H / J queries that share a key head, D key and E value channels,
N pages of P tokens. Exponentials are base 2, which is what the hardware provides.

Source: "Flash-Decoding for long-context inference", Dao, Haziza, Massa and Sizov, 2023; grouped queries as rows of one
matrix product as in PagedAttention, Kwon et al. 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sizes import KEY_GROUP, next_power_of_2
from .triton_eight_bits import load_groups, products_of

MAX_SPLITS = 32  # of the keys of a sequence: one kernel combines up to this many
SHARED_BYTES = 227 << 10  # that a program can have on Hopper; on GPUs for workstations it is 99 KiB
PLAIN_SHARED_BYTES = 64 << 10  # on Turing, where Triton uses no matrix instructions: tiles are as small as in float32


class DecodeTile(NamedTuple):
    """Tile size and launch parameters of a kernel. They affect its results only by rounding."""

    num_keys: int = 64  # per loop iteration
    num_warps: int = 4
    num_stages: int = 2  # the next tile is loaded while one is computed with; at 39 KiB, four programs fit on an SM


def decode_tile(
    dim: int, dtype: torch.dtype, *, shared_bytes: int = SHARED_BYTES, has_eight_bits: bool = False
) -> DecodeTile:
    """A tile that fits in the registers of a program: the default for half precision and head sizes up to 256."""
    is_plain = shared_bytes <= PLAIN_SHARED_BYTES
    if dim > 128 and (dtype.itemsize > 2 or is_plain):
        return DecodeTile(num_keys=16, num_warps=8, num_stages=1)
    if has_eight_bits and (dtype.itemsize > 2 or is_plain):
        return DecodeTile(num_keys=16, num_stages=1)
    if has_eight_bits:
        return DecodeTile(num_stages=3) if dim <= 128 else DecodeTile(num_keys=32, num_warps=8)
    if is_plain:
        return DecodeTile(num_keys=32, num_stages=1)
    return DecodeTile() if dim <= 256 else DecodeTile(num_keys=32)


@triton.jit
def _bounded(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores up to the factor ``_unit``, which is free where it is applied: fused with subtracting the maximum.

    tanh x is 2 sigmoid(2 x) - 1.
    """
    if HAS_SOFTCAP:
        products = softcap * (2 * tl.sigmoid(products * (2 * scale) / softcap) - 1)
    return products


@triton.jit
def _unit(scale, HAS_SOFTCAP: tl.constexpr):
    """The factor that turns ``_bounded`` scores into base-2 exponents. It must be positive."""
    return 1.4426950408889634 if HAS_SOFTCAP else scale * 1.4426950408889634


@triton.jit
def pages_of(table, first, end, P: tl.constexpr, BLOCK_N: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Pages of the keys from ``first`` to ``end``, int32 [BLOCK_N].

    ``IS_ALIGNED``: tiles begin at multiples of their size. If a tile then lies within one page, it takes a single table
    lookup, and arithmetic that is uniform for all its keys.

    Loops load those of the next tile: if the address of a key depended on a load in the same iteration, the compiler
    would prefetch keys for half as many iterations.
    """
    if IS_ALIGNED and P % BLOCK_N == 0:
        page = tl.load(table + first // P, mask=first < end, other=0)
    else:
        key = first + tl.arange(0, BLOCK_N)
        page = tl.load(table + key // P, mask=key < end, other=0)
    return page


@triton.jit
def offsets_of(first, P: tl.constexpr, BLOCK_N: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Their offsets in these pages [BLOCK_N]."""
    n = tl.arange(0, BLOCK_N)
    if IS_ALIGNED and P % BLOCK_N == 0:
        offset = first % P + n
    else:
        offset = (first + n) % P
    return offset


# Sizes and addresses that change from step to step must not trigger a recompilation, which takes seconds.
@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=["tables", "context_lens"])
def _decode(
    query, keys, values, scales, output, weights, tables, context_lens, sinks,
    scale, softcap, window, table_width,
    query_token, query_head,
    key_slot: tl.constexpr, key_head: tl.constexpr, value_slot: tl.constexpr, value_head: tl.constexpr,
    scale_page: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One program computes one sequence, one key head and one split of the keys. With S > 0, pages have eight bits, and
    a token and head has S scales.
    """
    s, j, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    g, d, e = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    head = j * G + g
    context = tl.load(context_lens + s)
    first = tl.maximum(context - window, 0) if HAS_WINDOW else 0
    # A split is a whole number of tiles, so that no tile is loaded by two programs.
    share = tl.cdiv(tl.cdiv(context - first, BLOCK_N), num_splits) * BLOCK_N
    start = first + split * share
    end = tl.minimum(start + share, context)
    q_row, is_query = query + s.to(tl.int64) * query_token + head[:, None] * query_head, (g < G)[:, None]
    if S:
        q_groups = load_groups(q_row, is_query, D, BLOCK_D)
    else:
        q = tl.load(q_row + d[None, :], mask=is_query & (d < D)[None, :], other=0.0)
    most = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    if HAS_SINKS:  # noqa: SIM102, one condition is decided at compile time, the other at run time
        if split == 0:  # a weight without a value, once per head
            most = tl.load(sinks + head, mask=g < G, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
    mixed = tl.zeros([BLOCK_G, BLOCK_E], tl.float32)
    unit = _unit(scale, HAS_SOFTCAP)
    table = tables + s * table_width
    next_page = pages_of(table, start, end, P, BLOCK_N, not HAS_WINDOW)
    for n in range(start, end, BLOCK_N):
        is_key = n + tl.arange(0, BLOCK_N) < end
        page, offset = next_page.to(tl.int64), offsets_of(n, P, BLOCK_N, not HAS_WINDOW)
        next_page = pages_of(table, n + BLOCK_N, end, P, BLOCK_N, not HAS_WINDOW)
        slot = page * P + offset
        own_keys, own_scales = keys + slot * key_slot + j * key_head, scales + page * scale_page + j * (S * P) + offset
        if S:
            products = products_of(
                q_groups, own_keys, own_scales, is_key, P, D, query.dtype.element_ty, BLOCK_G, BLOCK_D, BLOCK_N
            )
        else:
            k = tl.load(own_keys[None, :] + d[:, None], mask=is_key[None, :] & (d < D)[:, None], other=0.0)
            products = tl.dot(q, k, input_precision="ieee")
        scores = _bounded(products, scale, softcap, HAS_SOFTCAP)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1) * unit)
        share_of_old = tl.exp2(most - new_most)
        p = tl.exp2(scores * unit - new_most[:, None])
        total = total * share_of_old + tl.sum(p, 1)
        v_tile = values + slot[:, None] * value_slot + j * value_head + e[None, :]
        v = tl.load(v_tile, mask=is_key[:, None] & (e < E)[None, :], other=0.0)
        if S:
            p = p * tl.load(own_scales + (S - 1) * P, mask=is_key, other=0.0).to(tl.float32)[None, :]
        v = v.to(query.dtype.element_ty)
        mixed = mixed * share_of_old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        most = new_most
    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total)[:, None]
    place = (s.to(tl.int64) * tl.num_programs(1) * G + head) * num_splits + split
    is_head = g < G
    tl.store(output + place[:, None] * E + e[None, :], mixed.to(output.dtype.element_ty),
             mask=is_head[:, None] & (e < E)[None, :])  # fmt: skip
    if IS_SPLIT:
        log_total = most + tl.log2(tl.where(is_empty, 1.0, total))
        tl.store(weights + place, tl.where(is_empty, float("-inf"), log_total), mask=is_head)


@triton.jit(do_not_specialize=["num_splits"])
def _combine(parts, weights, output, num_splits,
             E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SPLITS: tl.constexpr):  # fmt: skip
    """One program combines the splits of one head of one sequence into its output, always in the same order."""
    row = tl.program_id(0).to(tl.int64)
    split, e = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_E)
    exponent = tl.load(weights + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    most = tl.max(exponent, 0)
    share = tl.exp2(exponent - tl.where(most == float("-inf"), 0.0, most))
    tile = parts + (row * num_splits + split)[:, None] * E + e[None, :]
    # A split without keys has weight 0 and an output of zeros.
    part = tl.load(tile, mask=(split < num_splits)[:, None] & (e < E)[None, :], other=0.0)
    total = tl.sum(share, 0)
    mixed = tl.sum(part * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + row * E + e, mixed.to(output.dtype.element_ty), mask=e < E)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    num_splits: int,
    tile: DecodeTile | None = None,
) -> torch.Tensor:
    """Outputs [S, H, E] of queries [S, H, D] over pages [N, P, J, D] and [N, P, J, E], block tables int32 [S, W]. With
    ``scales`` the pages are in eight bits (``attention.eight_bits``).

    A sequence of context 0 gets zeros. All launch shapes follow from the shapes of the arguments and ``num_splits``:
    the host reads no device memory.
    """
    num_seqs, num_heads, key_dim = query.shape
    _, page_size, num_kv_heads, value_dim = values.shape
    tile = tile or decode_tile(max(key_dim, value_dim), query.dtype)
    group = num_heads // num_kv_heads
    output = query.new_empty(num_seqs, num_heads, value_dim)
    if not num_seqs:
        return output
    parts, weights = output, output
    if num_splits > 1:
        parts = query.new_empty(num_seqs, num_heads, num_splits, value_dim, dtype=torch.float32)
        weights = query.new_empty(num_seqs, num_heads, num_splits, dtype=torch.float32)
    _decode[num_seqs, num_kv_heads, num_splits](
        query, keys, values, keys if scales is None else scales, parts, weights, block_tables, context_lens,
        output if sinks is None else sinks,
        scale, softcap or 0.0, window or 0, block_tables.stride(0),
        query.stride(0), query.stride(1),
        key_slot=keys.stride(1), key_head=keys.stride(2), value_slot=values.stride(1), value_head=values.stride(2),
        scale_page=0 if scales is None else scales.stride(0), S=0 if scales is None else scales.shape[2],
        P=page_size, G=group, D=key_dim, E=value_dim,
        BLOCK_G=max(16, next_power_of_2(group)),  # a matrix product needs at least 16 rows
        BLOCK_D=max(16 if scales is None else KEY_GROUP, next_power_of_2(key_dim)),
        BLOCK_E=max(16, next_power_of_2(value_dim)), BLOCK_N=tile.num_keys, IS_SPLIT=num_splits > 1,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        block_dim, block_splits = next_power_of_2(value_dim), max(MAX_SPLITS, next_power_of_2(num_splits))
        _combine[(num_seqs * num_heads,)](
            parts, weights, output, num_splits, E=value_dim, BLOCK_E=block_dim, BLOCK_SPLITS=block_splits,
            num_warps=min(16, max(1, block_dim * block_splits // 1024)),
        )  # fmt: skip
    return output
