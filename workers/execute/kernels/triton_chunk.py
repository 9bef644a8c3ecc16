"""Attention for chunks of prompts, over pages that hold earlier tokens and the chunk itself, which was just written.

Axes as in ``triton_decode``; C chunks with T tokens in total. The rows of a tile are the G queries of a key head for
several tokens of one chunk, so a key is loaded once for all of them.

A row's result depends on its own query and keys only: tiles of keys begin at multiples of their size, in increasing
order, and a tile that is masked entirely for a row leaves every bit of it unchanged. So a token has the same bits in a
chunk of any size, and also if it is decoded by this kernel. Sums that are rounded once are written as such (``fma``): a
compiler left to decide could decide differently where keys are split.

The tiles of all chunks are numbered one after the other, and a program finds its chunk by the number of its tile. So a
launch is as large as the tokens and chunks of a step, however long each chunk is; a CUDA graph contains it for any.

Few queries after many keys would occupy few processors. So keys can be split as in ``triton_decode``, at multiples of a
number, and what the splits yield is added up one after the other. A row has the same bits whether programs of their own
compute its splits or one program does, and whether the splits were made for it or for another sequence of the step.

Source: "FlashAttention-2", Dao, 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sizes import KEY_GROUP, next_power_of_2
from .triton_decode import PLAIN_SHARED_BYTES, SHARED_BYTES, _bounded, _unit, offsets_of, pages_of
from .triton_eight_bits import load_tile, widened


class ChunkTile(NamedTuple):
    """The tile sizes and launch parameters of the kernel."""

    num_rows: int = 64  # queries per program: tokens times G
    num_keys: int = 64  # per loop iteration
    num_warps: int = 4
    num_stages: int = 3  # two tiles of keys are loaded while one is computed with
    max_registers: int | None = None  # of a thread
    holds: bool = False  # whether keys and values in eight bits are widened once for all warps, see ``load_tile``


def chunk_tile(
    dim: int, dtype: torch.dtype, *, shared_bytes: int = SHARED_BYTES, has_eight_bits: bool = False
) -> ChunkTile:
    """A tile that fits in the registers of a program: the default for half precision and head sizes up to 128.

    Two programs of it fit on an SM of Hopper, and one multiplies while the other finds exponentials.
    """
    if dtype.itemsize > 2 or shared_bytes <= PLAIN_SHARED_BYTES:
        num_keys = 16 if has_eight_bits else 32
        return ChunkTile(num_rows=16, num_keys=num_keys, num_warps=4 if dim <= 128 else 8, num_stages=1)
    is_large = shared_bytes >= SHARED_BYTES
    if dim <= 128:
        tile = ChunkTile()
        if has_eight_bits:  # on Hopper a third program fits on an SM, with a few registers less than the compiler takes
            tile = tile._replace(num_stages=2, max_registers=168 if is_large else None)
    elif has_eight_bits and not is_large:
        tile = ChunkTile(num_rows=32, num_keys=32)
    elif dim <= 256:  # three stages take 132 KiB
        tile = ChunkTile(num_keys=32, num_warps=8, num_stages=3 if shared_bytes > 132 << 10 else 2)
    else:
        tile = ChunkTile(num_rows=32, num_keys=32, num_warps=8, num_stages=2)
    # Elsewhere products read keys from registers: they are widened once anyway.
    return tile._replace(holds=has_eight_bits and not is_large)


class KeySplits(NamedTuple):
    """How keys are split."""

    num_keys: int  # in a split, a multiple of any tile's
    is_parallel: bool  # whether each split is computed by a program of its own
    most: int | None = None  # splits in parallel: those of longer sequences have a multiple of ``num_keys``


@triton.jit
def _shares(most, weight):
    """The greater of two base-2 exponents, and the factors of what had the one and of what had the other."""
    new_most = tl.maximum(most, weight)
    base = tl.where(new_most == float("-inf"), 0.0, new_most)  # neither has seen keys
    return new_most, tl.exp2(most - base), tl.exp2(weight - base)


@triton.jit
def _split(
    q, position, whole_start, whole_end, first_key, end, keys, values, scales, table, scale, softcap, window,
    key_slot: tl.constexpr, value_slot: tl.constexpr, scale_page: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, HOLDS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The mixed values for the keys from ``first_key`` to ``end``, and their weights as base-2 exponents.

    All rows see all keys from ``whole_start`` to ``whole_end``, so that these need no masks.
    """
    n, d, e = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    unit = _unit(scale, HAS_SOFTCAP)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    next_page = pages_of(table, first_key, end, P, BLOCK_N, True)
    for first in range(first_key, end, BLOCK_N):
        is_key = first + n < end
        page, offset = next_page.to(tl.int64), offsets_of(first, P, BLOCK_N, True)
        next_page = pages_of(table, first + BLOCK_N, end, P, BLOCK_N, True)
        if S:
            key_numbers, key_scales, value_numbers, value_scales = load_tile(
                keys, values, scales, page, offset, is_key,
                key_slot, value_slot, scale_page, P, S, D, E, BLOCK_D, BLOCK_E, BLOCK_N, HOLDS,
            )  # fmt: skip
            k = tl.trans(widened(key_numbers, key_scales, q.dtype))
        else:
            slot = page * P + offset
            k_tile = keys + slot[None, :] * key_slot + d[:, None]
            k = tl.load(k_tile, mask=is_key[None, :] & (d < D)[:, None], other=0.0)
        scores = _bounded(tl.dot(q, k, input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
        if (first < whole_start) | (first + BLOCK_N > whole_end):
            key_position = first + n
            is_seen = key_position[None, :] <= position[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (key_position[None, :] > position[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1) * unit)
        base = tl.where(new_most == float("-inf"), 0.0, new_most)  # while a row has seen no keys
        share_of_old = tl.exp2(most - base)
        p = tl.exp2(tl.fma(scores, unit, -base[:, None]))
        if S:
            v = widened(value_numbers, value_scales, q.dtype)
        else:
            v_tile = values + slot[:, None] * value_slot + e[None, :]
            v = tl.load(v_tile, mask=is_key[:, None] & (e < E)[None, :], other=0.0)
        mixed = mixed * share_of_old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = tl.fma(total, share_of_old, tl.sum(p, 1))
        most = new_most
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    return mixed * (1.0 / total)[:, None], tl.where(is_empty, float("-inf"), most + tl.log2(total))


@triton.jit
def _first_tile(start, chunk, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """A chunk's first tile, if it starts at a token: no tile has rows of two chunks, so each costs at most one more."""
    return start * G // BLOCK_M + chunk


@triton.jit
def _chunk_of(tile, query_starts, num_chunks, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """The last chunk whose first tile is at most this one."""
    first, found = tl.load(query_starts), -1
    for begin in range(0, num_chunks, 128):
        chunk = begin + tl.arange(0, 128)
        start = tl.load(query_starts + chunk, mask=chunk < num_chunks, other=0) - first
        is_before = (chunk < num_chunks) & (_first_tile(start, chunk, G, BLOCK_M) <= tile)
        found += tl.sum(is_before.to(tl.int32), 0)
    return found


# As for ``_decode``: values that change from step to step must not trigger a recompilation.
@triton.jit(
    do_not_specialize=["num_chunks", "table_width", "split_keys", "num_splits"],
    do_not_specialize_on_alignment=["tables", "context_lens", "query_starts"],
)
def _chunk(
    query, keys, values, scales, output, parts, weights, tables, context_lens, query_starts, sinks,
    scale, softcap, window, num_chunks, table_width, split_keys, num_splits,
    query_token, query_head, output_token, output_head,
    key_slot: tl.constexpr, key_head: tl.constexpr, value_slot: tl.constexpr, value_head: tl.constexpr,
    scale_page: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, HOLDS: tl.constexpr,
    IS_SPLIT: tl.constexpr, IS_SUMMED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M queries of one chunk and one key head: all splits of the keys, whose sum it keeps in
    ``parts`` if ``IS_SUMMED``; or with ``IS_SPLIT`` one of them, for ``_sum_splits``.
    """
    # Programs start in the order of their numbers: all heads of a tile before the next tile, or the largest tiles of
    # the last heads would start late, and run alone at the end.
    split, number = 0, tl.program_id(0)
    if IS_SPLIT:
        split, number = number % num_splits, number // num_splits
    tile, j = number // (H // G), number % (H // G)
    s = _chunk_of(tile, query_starts, num_chunks, G, BLOCK_M)
    start = tl.load(query_starts + s)
    num_tokens = tl.load(query_starts + s + 1) - start
    start -= tl.load(query_starts)
    # The tiles of a chunk that see the most keys start first.
    first_row = (tl.cdiv(num_tokens * G, BLOCK_M) - 1 - (tile - _first_tile(start, s, G, BLOCK_M))) * BLOCK_M
    if first_row < 0:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    token, head = row // G, j * G + row % G
    is_row = token < num_tokens
    place = (start + token).to(tl.int64)
    part = place * H + head
    before = tl.load(context_lens + s) - num_tokens  # keys from before this step
    position = before + token  # of each row's token: the last key it sees
    first_position = before + first_row // G
    end = tl.maximum(before + tl.minimum((first_row + BLOCK_M - 1) // G, num_tokens - 1) + 1, 0)
    first_key = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N if HAS_WINDOW else 0
    whole_start = tl.cdiv(tl.maximum(end - window, 0), BLOCK_N) * BLOCK_N if HAS_WINDOW else 0
    whole_end = (first_position + 1) // BLOCK_N * BLOCK_N
    first_split = first_key // split_keys * split_keys
    if IS_SPLIT:
        split_keys *= tl.maximum(tl.cdiv(end - first_split, num_splits * split_keys), 1)
        first_key = tl.maximum(first_key, first_split + split * split_keys)
        end = tl.minimum(end, first_split + (split + 1) * split_keys)
        if first_key >= end:
            tl.store(weights + part * num_splits + split, float("-inf"), mask=is_row)
            return
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q_tile = query + place[:, None] * query_token + head[:, None] * query_head + d[None, :]
    q = tl.load(q_tile, mask=is_row[:, None] & (d < D)[None, :], other=0.0)
    own_keys, own_values, table = keys + j * key_head, values + j * value_head, tables + s * table_width
    own_scales = scales + j * (S * P)
    is_output = is_row[:, None] & (e < E)[None, :]
    if IS_SUMMED:
        most, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        sums = parts + part[:, None] * E + e[None, :]
        for low in range(first_split, end, split_keys):
            mixed, weight = _split(
                q, position, whole_start, whole_end, tl.maximum(first_key, low), tl.minimum(end, low + split_keys),
                own_keys, own_values, own_scales, table, scale, softcap, window, key_slot, value_slot, scale_page, S,
                P, D, E, BLOCK_M, BLOCK_D, BLOCK_E, BLOCK_N, HOLDS, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
            most, of_sum, of_split = _shares(most, weight)
            total = tl.fma(total, of_sum, of_split)
            old = tl.load(sums, mask=is_output & (first_split < low), other=0.0)
            tl.debug_barrier()  # other threads may store what these load, now and in the next iteration
            tl.store(sums, tl.fma(mixed, of_split[:, None], old * of_sum[:, None]), mask=is_output)
            tl.debug_barrier()
        mixed = tl.load(sums, mask=is_output & (first_split < end), other=0.0)
    else:
        mixed, most = _split(
            q, position, whole_start, whole_end, first_key, end, own_keys, own_values, own_scales, table, scale,
            softcap, window, key_slot, value_slot, scale_page, S,
            P, D, E, BLOCK_M, BLOCK_D, BLOCK_E, BLOCK_N, HOLDS, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
        total = tl.where(most == float("-inf"), 0.0, 1.0)
    if IS_SPLIT:
        part = part * num_splits + split
        tl.store(weights + part, most, mask=is_row)
        tl.store(parts + part[:, None] * E + e[None, :], mixed, mask=is_output)
        return
    if HAS_SINKS:  # a weight without a value
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        most, of_sum, of_sink = _shares(most, sink)
        total = tl.fma(total, of_sum, of_sink)
        mixed = mixed * of_sum[:, None]
    if HAS_SINKS or IS_SUMMED:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    o_tile = output + place[:, None] * output_token + head[:, None] * output_head + e[None, :]
    tl.store(o_tile, mixed.to(output.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["num_splits"])
def _sum_splits(
    parts, weights, output, sinks, num_splits, output_token, output_head,
    H: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One program adds up the splits of one head of one token, with the arithmetic of ``IS_SUMMED`` in ``_chunk``."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    mixed, most, total = tl.zeros([BLOCK_E], tl.float32), float("-inf"), 0.0
    for split in range(num_splits):
        part = row * num_splits + split
        weight = tl.load(weights + part)
        num_values = tl.where(weight == float("-inf"), 0, E)  # nothing was written for a split without keys
        value = tl.load(parts + part * E + e, mask=e < num_values, other=0.0)
        most, of_sum, of_split = _shares(most, weight)
        total = tl.fma(total, of_sum, of_split)
        mixed = tl.fma(value, of_split, mixed * of_sum)
    if HAS_SINKS:
        sink = tl.load(sinks + row % H).to(tl.float32) * 1.4426950408889634
        most, of_sum, of_sink = _shares(most, sink)
        total = tl.fma(total, of_sum, of_sink)
        mixed = mixed * of_sum
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    place = output + row // H * output_token + row % H * output_head
    tl.store(place + e, mixed.to(output.dtype.element_ty), mask=e < E)


def chunk_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    tile: ChunkTile | None = None,
    splits: KeySplits | None = None,
) -> None:
    """Writes ``output`` [T, H, E] for the queries [T, H, D] of chunks. ``query_starts`` int32 [C + 1] may begin at any
    number, for example if the chunks come after decodes: only its differences matter.

    ``context_lens`` [C] and ``block_tables`` [C, W] are per chunk; with a context of 0, a chunk's outputs are zeros.
    Without ``splits`` no keys are split. With ``scales`` the pages are in eight bits (``attention.eight_bits``).
    """
    num_chunks = len(context_lens)
    if not num_chunks:
        return
    num_tokens, num_heads, key_dim = query.shape
    _, page_size, num_kv_heads, value_dim = values.shape
    tile = tile or chunk_tile(max(key_dim, value_dim), query.dtype)
    group = num_heads // num_kv_heads
    split_keys, is_parallel, _ = splits or (1, False, None)
    is_summed = splits is not None and not is_parallel
    num_splits, parts, weights, sinks_or_any = 1, output, output, output if sinks is None else sinks
    if splits is not None:
        if is_parallel:
            num_splits = _most_splits(block_tables.shape[1] * page_size, split_keys, tile, group, window)
            num_splits = min(num_splits, splits.most or num_splits)
        parts = query.new_empty(num_tokens, num_heads, num_splits, value_dim, dtype=torch.float32)
        weights = query.new_empty(num_tokens, num_heads, num_splits, dtype=torch.float32)
    num_tiles = num_tokens * group // tile.num_rows + num_chunks
    _chunk[(num_tiles * num_kv_heads * num_splits,)](
        query, keys, values, keys if scales is None else scales, output, parts, weights, block_tables, context_lens,
        query_starts, sinks_or_any,
        scale, softcap or 0.0, window or 0, num_chunks, block_tables.stride(0), split_keys, num_splits,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        key_slot=keys.stride(1), key_head=keys.stride(2), value_slot=values.stride(1), value_head=values.stride(2),
        scale_page=0 if scales is None else scales.stride(0), S=0 if scales is None else scales.shape[2],
        P=page_size, G=group, H=num_heads, D=key_dim, E=value_dim,
        BLOCK_M=tile.num_rows, BLOCK_D=max(16 if scales is None else KEY_GROUP, next_power_of_2(key_dim)),
        BLOCK_E=max(16, next_power_of_2(value_dim)), BLOCK_N=tile.num_keys, HOLDS=tile.holds,
        IS_SPLIT=is_parallel, IS_SUMMED=is_summed,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        **_limited(None if is_summed else tile.max_registers),  # what it sums would not fit
    )  # fmt: skip
    if is_parallel:
        _sum_splits[(num_tokens * num_heads,)](
            parts, weights, output, sinks_or_any, num_splits, output.stride(0), output.stride(1),
            H=num_heads, E=value_dim, BLOCK_E=next_power_of_2(value_dim), HAS_SINKS=sinks is not None,
            num_warps=1,
        )  # fmt: skip


def _limited(max_registers: int | None) -> dict[str, int]:
    """The option of a launch for it. AMD's compiler has none."""
    return {"maxnreg": max_registers} if max_registers is not None and torch.version.hip is None else {}


def _most_splits(num_keys: int, split_keys: int, tile: ChunkTile, group: int, window: int | None) -> int:
    """Splits among which the keys of a tile of queries can lie, if the longest sequence has ``num_keys``."""
    num_splits = -(-num_keys // split_keys)
    if window is None:
        return num_splits
    num_seen = window - (-tile.num_rows // group)  # by any of its tokens
    return min(num_splits, 1 - (-num_seen // split_keys))
