"""Attention for chunks of prompts on Hopper: what ``triton_chunk`` computes without splits, windows, caps and sinks, in
pages of half precision that hold whole tiles of keys. Axes are those of ``triton_chunk``.

It is written in Gluon, in which a kernel says when it waits for a product: Triton's compiler waits for each at once. A
group of warps has 64 rows of a tile of queries, and a warp of its own loads keys and values. The group asks for the
scores of a tile of keys, and for the product of the weights that it has with the values of the tile before. While that
runs, it finds the maximum of the scores. While it finds exponentials, another group on the same multiprocessor
multiplies: of a program with two, which share the keys, or of another program.

A row's result depends on its own query and keys only, as there.

Source: "FlashAttention-3", Shah et al., 2024.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .triton_chunk import _first_tile as _first_tile_of_triton

NUM_ROWS, NUM_KEYS = 64, 64  # of a group, and of a tile of keys
DIMS = (64, 128)  # with more channels, a group's sums do not fit in its registers
_WARPS = 4  # of a group: those that share a product
_GROUP_REGISTERS, _LOADER_REGISTERS = 240, 24  # of a thread, once a program has started


class HopperTile(NamedTuple):
    """How tiles of queries are computed."""

    num_groups: int  # of a program
    num_stages: int  # tiles of keys in shared memory, each with the values of the tile before
    max_registers: int  # of a thread when a program starts, which its warps then divide
    stays: bool  # whether there is one program for each multiprocessor, which takes tile after tile


LARGE = HopperTile(num_groups=2, num_stages=4, max_registers=168, stays=True)
SMALL = HopperTile(num_groups=1, num_stages=2, max_registers=128, stays=False)  # two programs fit
# Large tiles start and end too often if a multiprocessor has fewer of them in a launch, or if chunks have fewer tokens.
_LARGE_TURNS, _LARGE_CHUNK = 3, 1024

_first_tile = gluon.jit(_first_tile_of_triton.fn)
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # since Triton 3.8


@gluon.jit
def _deal(
    turn, step, G: gl.constexpr, H: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_WARPS: gl.constexpr
):
    """The tile of queries that a program computes in its turn: its key head, its chunk, that chunk's first token and
    their number, the first row, the keys before the chunk and before the tile's end, and how many tiles of keys there
    are: all, which is 0 if there is nothing to compute, and those that all rows see.

    Tiles are dealt forwards and backwards by turns, as those of a chunk are the smaller the later they come.
    """
    context_lens, query_starts, num_chunks, num_programs = step
    place, grid = gl.program_id(0), gl.num_programs(0)
    number = turn * grid + gl.where(turn % 2 == 0, place, grid - 1 - place)
    tile, j = number // (H // G), number % (H // G)
    first, s = gl.load(query_starts), -1
    for begin in range(0, num_chunks, 128):
        chunk = begin + gl.arange(0, 128, gl.BlockedLayout([4], [32], [NUM_WARPS], [0]))
        chunk_start = gl.load(query_starts + chunk, mask=chunk < num_chunks, other=0) - first
        is_before = (chunk < num_chunks) & (_first_tile(chunk_start, chunk, G, BLOCK_M) <= tile)
        s += gl.sum(is_before.to(gl.int32), 0)
    start = gl.load(query_starts + s)
    num_tokens = gl.load(query_starts + s + 1) - start
    before = gl.load(context_lens + s) - num_tokens
    start -= first
    first_row = (gl.cdiv(num_tokens * G, BLOCK_M) - 1 - (tile - _first_tile(start, s, G, BLOCK_M))) * BLOCK_M
    end = gl.maximum(before + gl.minimum((first_row + BLOCK_M - 1) // G, num_tokens - 1) + 1, 0)
    is_none = (first_row < 0) | (number >= num_programs)
    num_tiles = gl.where(is_none, 0, gl.maximum(gl.cdiv(end, BLOCK_N), 1))
    return j, s, start, num_tokens, first_row, before, end, num_tiles, (before + first_row // G + 1) // BLOCK_N


@gluon.jit
def _weights(
    scores, most, total, position, first_key, unit, BLOCK_N: gl.constexpr, IS_MASKED: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """Of the keys of a tile, with the new maximum and total, and the factor of what was added up before."""
    if IS_MASKED:
        key = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_most = gl.maximum(most, gl.max(scores, 1) * unit)
    base = new_most
    if IS_MASKED:
        base = gl.where(new_most == float("-inf"), 0.0, new_most)  # while a row has seen no keys
    share_of_old = gl.exp2(most - base)
    zeros = gl.zeros(scores.shape, gl.float32, SCORES)
    p = gl.exp2(gl.fma(scores, zeros + unit, zeros - base[:, None]))
    return p, new_most, gl.fma(total, share_of_old, gl.sum(p, 1)), share_of_old


@gluon.jit
def _next_keys(
    i, at, q, p, mixed, most, total, position, unit, ring, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    IS_MASKED: gl.constexpr, SCORES: gl.constexpr, MIXED: gl.constexpr,
):  # fmt: skip
    """Scores and weights for the keys of tile ``i``, and the values of the tile before, which get the weights ``p``.

    ``at``: how many tiles of keys this program loaded before this one.
    """
    keys, values, ready, empty = ring
    stage = at % STAGES
    mbarrier.wait(ready.index(stage), at // STAGES & 1)
    none = gl.zeros([most.shape[0], BLOCK_N], gl.float32, SCORES)
    scores = warpgroup_mma(q, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    mixed = warpgroup_mma(p, values.index(stage), mixed, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    p, most, total, share_of_old = _weights(
        scores, most, total, position, i * BLOCK_N, unit, BLOCK_N, IS_MASKED, SCORES
    )
    p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, MIXED, 2))
    mixed = warpgroup_mma_wait(0, deps=[mixed])
    mbarrier.arrive(empty.index(stage), count=1)
    mixed = mixed * gl.convert_layout(share_of_old, gl.SliceLayout(1, MIXED))[:, None]
    return p, mixed, most, total


@gluon.jit
def _attend(
    rows, step, unit, ring, last_values, GROUP: gl.constexpr, G: gl.constexpr, H: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """What a group of warps does: its rows of each tile of queries."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_N, 16])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, D, 16])
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [NUM_WARPS, 1], [1, 0])
    query, output, query_token, query_head, output_token, output_head = rows
    keys, values, ready, empty = ring
    d = gl.arange(0, D, gl.SliceLayout(0, MEMORY))
    at = 0
    for turn in range(gl.cdiv(step[3], gl.num_programs(0))):
        j, _, start, num_tokens, first_row, before, end, num_tiles, num_whole = _deal(
            turn, step, G, H, BLOCK_M, BLOCK_N, NUM_WARPS
        )
        if num_tiles > 0:
            first_row += GROUP * ROWS
            row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, MEMORY))
            token, head = row // G, j * G + row % G
            place, is_row = (start + token).to(gl.int64), (token < num_tokens)[:, None]
            q_tile = query + (place * query_token + head * query_head)[:, None] + d[None, :]
            q = gl.convert_layout(gl.load(q_tile, mask=is_row, other=0.0), gl.DotOperandLayout(0, SCORES, 2))
            position = before + (first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))) // G
            most = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            mixed = gl.zeros([ROWS, D], gl.float32, MIXED)

            stage = at % STAGES
            mbarrier.wait(ready.index(stage), at // STAGES & 1)
            none = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
            scores = warpgroup_mma(q, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            p, most, total, _share = _weights(scores, most, total, position, 0, unit, BLOCK_N, True, SCORES)
            p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, MIXED, 2))
            mbarrier.arrive(empty.index(stage), count=1)
            for i in range(1, num_whole):
                p, mixed, most, total = _next_keys(
                    i, at + i, q, p, mixed, most, total, position, unit, ring, BLOCK_N, STAGES, False, SCORES, MIXED
                )
            for i in range(gl.maximum(num_whole, 1), num_tiles):
                p, mixed, most, total = _next_keys(
                    i, at + i, q, p, mixed, most, total, position, unit, ring, BLOCK_N, STAGES, True, SCORES, MIXED
                )
            at += num_tiles
            stage = at % STAGES
            mbarrier.wait(ready.index(stage), at // STAGES & 1)
            at += 1
            if end < num_tiles * BLOCK_N:  # what a page has after the last key may be anything: also NaN
                key = (num_tiles - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, MEMORY))
                v = gl.where((key < end)[:, None], values.index(stage).load(MEMORY), 0.0)
                last_values.index(GROUP).store(v)
                fence_async_shared()  # products read what other instructions wrote
                mixed = warpgroup_mma(p, last_values.index(GROUP), mixed, is_async=True)
                mixed = warpgroup_mma_wait(0, deps=[mixed])
            else:
                mixed = warpgroup_mma(p, values.index(stage), mixed, is_async=True)
                mixed = warpgroup_mma_wait(0, deps=[mixed])
            mbarrier.arrive(empty.index(stage), count=1)
            total = gl.where(total == 0.0, 1.0, total)
            mixed = mixed * gl.convert_layout(1.0 / total, gl.SliceLayout(1, MIXED))[:, None]
            o_tile = output + (place * output_token + head * output_head)[:, None] + d[None, :]
            gl.store(o_tile, gl.convert_layout(mixed.to(q.dtype), MEMORY), mask=is_row)


@gluon.jit
def _load(
    all_keys, all_values, tables, table_width, step, ring, G: gl.constexpr, H: gl.constexpr, P: gl.constexpr,
    D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the loading warp does: tile after tile of keys, each with the values of the tile before."""
    keys, values, ready, empty = ring
    BYTES: gl.constexpr = BLOCK_N * D * 2
    at = 0
    for turn in range(gl.cdiv(step[3], gl.num_programs(0))):
        j, s, _, _, _, _, end, num_tiles, _ = _deal(turn, step, G, H, BLOCK_M, BLOCK_N, 1)
        if num_tiles > 0:
            table = tables + s * table_width
            next_page = gl.load(table, mask=end > 0, other=0)
            v_slot = 0
            for i in range(num_tiles):
                slot = next_page * P + i * BLOCK_N % P
                next_key = (i + 1) * BLOCK_N
                next_page = gl.load(table + next_key // P, mask=next_key < end, other=0)
                stage = at % STAGES
                mbarrier.wait(empty.index(stage), at // STAGES & 1 ^ 1)
                at += 1
                mbarrier.expect(ready.index(stage), BYTES, pred=i == 0)
                mbarrier.expect(ready.index(stage), 2 * BYTES, pred=i > 0)
                _copy(all_keys, [slot, j * D], ready.index(stage), keys.index(stage))
                _copy(all_values, [v_slot, j * D], ready.index(stage), values.index(stage), pred=i > 0)
                v_slot = slot
            stage = at % STAGES
            mbarrier.wait(empty.index(stage), at // STAGES & 1 ^ 1)
            at += 1
            mbarrier.expect(ready.index(stage), BYTES)
            _copy(all_values, [v_slot, j * D], ready.index(stage), values.index(stage))


# Values that change from step to step must not trigger a recompilation.
@gluon.jit(
    do_not_specialize=["num_chunks", "table_width", "num_programs"],
    do_not_specialize_on_alignment=["tables", "context_lens", "query_starts"],
)
def _chunk_hopper(
    query, all_keys, all_values, output, tables, context_lens, query_starts, scale, num_chunks, table_width,
    num_programs, query_token, query_head, output_token, output_head,
    P: gl.constexpr, G: gl.constexpr, H: gl.constexpr, D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_GROUPS: gl.constexpr, STAGES: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = query.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], TILE)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], TILE)
    last_values = gl.allocate_shared_memory(dtype, [NUM_GROUPS, BLOCK_N, D], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(empty.index(stage), count=NUM_GROUPS)
    step = (context_lens, query_starts, num_chunks, num_programs)
    ring = (keys, values, ready, empty)
    unit = scale * 1.4426950408889634  # exponentials are base 2
    rows = (query, output, query_token, query_head, output_token, output_head)
    ROWS: gl.constexpr = BLOCK_M // NUM_GROUPS
    if NUM_GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (rows, step, unit, ring, last_values, 0, G, H, D, ROWS, BLOCK_M, BLOCK_N, STAGES, num_warps)),
                (_attend, (rows, step, unit, ring, last_values, 1, G, H, D, ROWS, BLOCK_M, BLOCK_N, STAGES, num_warps)),
                (_load, (all_keys, all_values, tables, table_width, step, ring, G, H, P, D, BLOCK_M, BLOCK_N, STAGES)),
            ],
            [num_warps, 1],
            [GROUP_REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (rows, step, unit, ring, last_values, 0, G, H, D, ROWS, BLOCK_M, BLOCK_N, STAGES, num_warps)),
                (_load, (all_keys, all_values, tables, table_width, step, ring, G, H, P, D, BLOCK_M, BLOCK_N, STAGES)),
            ],
            [1],
            [LOADER_REGISTERS],
        )


def hopper_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    num_processors: int,
    tile: HopperTile | None = None,
) -> None:
    """As ``chunk_attention``, for what ``suits_hopper``. Contiguous keys and values [N, P, J, D]."""
    num_chunks, (num_tokens, num_heads, dim) = len(context_lens), query.shape
    _, page_size, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    tile = tile or hopper_tile(num_tokens, num_heads, num_chunks, num_processors)
    num_rows = NUM_ROWS * tile.num_groups
    num_programs = (num_tokens * group // num_rows + num_chunks) * num_kv_heads
    _chunk_hopper[(min(num_programs, num_processors) if tile.stays else num_programs,)](
        query, _slots(keys), _slots(values), output, block_tables, context_lens, query_starts,
        scale, num_chunks, block_tables.stride(0), num_programs,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        P=page_size, G=group, H=num_heads, D=dim, BLOCK_M=num_rows, BLOCK_N=NUM_KEYS, NUM_GROUPS=tile.num_groups,
        STAGES=tile.num_stages, GROUP_REGISTERS=_GROUP_REGISTERS, LOADER_REGISTERS=_LOADER_REGISTERS,
        num_warps=_WARPS, maxnreg=tile.max_registers,
    )  # fmt: skip


def _slots(pages: torch.Tensor) -> TensorDescriptor:
    """All slots of pages, of which tiles of one head are copied."""
    num_pages, page_size, num_kv_heads, dim = pages.shape
    width = num_kv_heads * dim
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(pages, [num_pages * page_size, width], [width, 1], [NUM_KEYS, dim], layout)


def hopper_tile(num_tokens: int, num_heads: int, num_chunks: int, num_processors: int) -> HopperTile:
    """That which is the fastest for so many tokens in chunks of about the same length."""
    num_turns = num_tokens * num_heads / (LARGE.num_groups * NUM_ROWS * num_processors)
    return LARGE if num_turns >= _LARGE_TURNS and num_tokens >= _LARGE_CHUNK * num_chunks else SMALL


def suits_hopper(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether tensors have the types and shapes for which there is this kernel."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == keys.dtype
        and query.shape[2] in DIMS
        and keys.shape == values.shape
        and keys.shape[1] % NUM_KEYS == 0
        and all(pages.is_contiguous() and pages.data_ptr() % 16 == 0 for pages in (keys, values))
    )
