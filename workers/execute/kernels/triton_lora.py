"""What LoRA adapters add to a product, each row's own: a narrow product down to its rank, and one up that is added.

Once per step, rows are grouped into tiles that have one adapter. A program computes a tile with the weights of that
adapter and reads no others. Rows without an adapter are in no tile. Nothing waits for the host: a launch has as many
tiles as any choice of adapters could need, and surplus programs end at once.

A row's bits depend on itself and its adapter only. Both tiles use the same matrix instructions, of 16 rows, in the same
order, and the inputs of a sum are split at fixed places.

Axes: T tokens, G tiles of M rows, A adapters, K inputs, N outputs of the P matrices that share these inputs, S splits
of the inputs. Adapter a has ``widths[a]`` columns for each matrix, behind the ``starts[a]`` columns of those before it;
all have C columns together.

Source: "Punica", Chen et al. 2023, and "S-LoRA", Sheng et al. 2023; grouped rows as in ``triton_experts``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sizes import cdiv, next_power_of_2

_OUTPUTS = 128  # of a program that adds
_SPLIT, _MOST_SPLITS = 1024, 6  # the fewest inputs that a program sums, and parts that one may have to add up
_FEW = 256  # rows up to which more programs are worth more than reading weights less often
_GROUPED = 128  # rows per loop iteration when they are grouped
_ADDED = 512  # numbers of a program that adds up splits
_ALIGNMENT = 8  # elements that a thread reads or writes at once
_LEAST_COLUMNS, _MOST_COLUMNS = 16, 32  # of a tile: the fewest of a matrix instruction, and the most


class ShrinkTile(NamedTuple):
    """Sizes and launch parameters of the first product."""

    num_columns: int
    num_inputs: int  # per loop iteration
    num_stages: int


def tile_rows(num_rows: int) -> int:
    """Rows of a tile in a step of so many: few are spread over many programs."""
    return 16 if num_rows <= _FEW else 32


def shrink_tile(num_rows: int, num_columns: int, dtype: torch.dtype) -> ShrinkTile:
    """The tile for so many rows of a step, whose adapters have up to ``num_columns`` for all matrices of a product.

    With many rows, a program computes more columns, so that inputs are read less often. Type float32 has no matrix
    instructions: its tiles have to fit into the registers.
    """
    columns = _LEAST_COLUMNS if num_rows <= _FEW else _columns(num_columns)
    if dtype.itemsize > 2:
        return ShrinkTile(columns, 32, 2)
    return ShrinkTile(columns, 64, 10 if num_rows <= _FEW else 6)


def _columns(number: int, most: int = _MOST_COLUMNS) -> int:
    """The columns of a tile for so many."""
    return min(most, max(_LEAST_COLUMNS, next_power_of_2(number)))


def split_size(num_inputs: int, most_splits: int) -> int:
    """The inputs of a split, a power of two. It depends on their number alone: a row's bits depend on it."""
    return max(_SPLIT, next_power_of_2(cdiv(num_inputs, most_splits)))


class AdapterTiles(NamedTuple):
    """The rows of a step by their adapters."""

    rows: torch.Tensor  # int32 [G, M], the rows of a tile in order, -1 where there are none
    spans: torch.Tensor  # int32 [G, 2], start and width of its adapter's columns; a tile without rows has width 0


class OutputBlocks(NamedTuple):
    """The outputs that programs add to."""

    table: torch.Tensor  # int32 [B, 4]: a matrix, the first of some of the N, where it is in the product, their number
    num_outputs: int  # N
    alignment: int  # divides all places in the product, and all numbers


@triton.jit(do_not_specialize=["T", "G"], do_not_specialize_on_alignment=["adapters"])
def _group(adapters, starts, widths, rows, spans, T, G, A: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_T: tl.constexpr,
           BLOCK_M: tl.constexpr):  # fmt: skip
    """One program lists the rows of one adapter, after counting those of all. The last one marks surplus tiles."""
    own, a, i = tl.program_id(0), tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_T)
    counts = tl.zeros([BLOCK_A], tl.int32)
    for first in range(0, T, BLOCK_T):
        each = tl.load(adapters + first + i, mask=first + i < T, other=0)
        counts += tl.sum((each[:, None] == 1 + a[None, :]).to(tl.int32), 0)
    num_tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(a < own, num_tiles, 0), 0)
    end_tile = first_tile + tl.sum(tl.where(a == own, num_tiles, 0), 0)
    place = first_tile * BLOCK_M
    for first in range(0, T, BLOCK_T):
        each = tl.load(adapters + first + i, mask=first + i < T, other=0)
        is_own = (each == 1 + own).to(tl.int32)
        tl.store(rows + place + tl.cumsum(is_own, 0) - 1, first + i, mask=is_own > 0)
        place += tl.sum(is_own, 0)
    m = tl.arange(0, BLOCK_M)
    tl.store(rows + place + m, -1, mask=place + m < end_tile * BLOCK_M)
    start, width = tl.load(starts + own), tl.load(widths + own)
    for first in range(0, G, BLOCK_T):
        tile = first + i
        is_own = (tile >= first_tile) & (tile < end_tile)
        is_surplus = (tile >= end_tile) & (tile < G) & (own == A - 1)
        tl.store(spans + 2 * tile, start, mask=is_own)
        tl.store(spans + 2 * tile + 1, tl.where(is_own, width, 0), mask=is_own | is_surplus)


@triton.jit
def _tile(rows, spans, tile, BLOCK_M: tl.constexpr):
    """The rows of a tile, and start and width of its adapter's columns. Widths are multiples of 8, which aligns loads.

    All are loaded before a program can know that its tile is surplus: else two loads would wait for one another.
    """
    row = tl.load(rows + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    start, width = tl.load(spans + 2 * tile), tl.load(spans + 2 * tile + 1)
    return row, tl.multiple_of(start, 8).to(tl.int64), tl.multiple_of(width, 8)


@triton.jit(do_not_specialize=["T"])
def _shrink(x, down, rows, spans, inner, T, K, W, x_row, P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
            BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """One program: some columns of a tile, summed over one split of the inputs."""
    tile, column, split = tl.program_id(0), tl.program_id(1) * BLOCK_C, tl.program_id(2)
    row, start, width = _tile(rows, spans, tile, BLOCK_M)
    if column >= P * width:
        return
    c = column + tl.arange(0, BLOCK_C)
    is_row, is_column = row >= 0, c < P * width
    inputs = x + row.to(tl.int64)[:, None] * x_row
    weights = down + start * P * K + c.to(tl.int64)[None, :] * K
    total = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for first in range(split * SPLIT, min((split + 1) * SPLIT, K), BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        a = tl.load(inputs + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(weights + k[:, None], mask=is_column[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = inner + (split.to(tl.int64) * T + row)[:, None] * W + c[None, :]
    tl.store(place, total, mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["size"])
def _add_splits(inner, size, S: tl.constexpr, BLOCK: tl.constexpr):
    """One program adds up some sums of all splits, in the first."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(S):
        total += tl.load(inner + tl.cast(size, tl.int64) * split + i, mask=i < size, other=0.0)
    tl.store(inner + i, total, mask=i < size)


@triton.jit(do_not_specialize=["T"])
def _expand_add(inner, up, rows, spans, blocks, output, T, W, N, output_row, S: tl.constexpr,
                ALIGNMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_R: tl.constexpr):  # fmt: skip
    """One program adds to some outputs of a tile, which are rounded once."""
    tile, block = tl.program_id(0), blocks + 4 * tl.program_id(1)
    row, start, width = _tile(rows, spans, tile, BLOCK_M)
    matrix, first_weight = tl.load(block), tl.load(block + 1)
    first_output, count = tl.multiple_of(tl.load(block + 2), ALIGNMENT), tl.multiple_of(tl.load(block + 3), ALIGNMENT)
    if width == 0:
        return
    n = tl.arange(0, BLOCK_N)
    is_row, is_output = row >= 0, n < count
    place = output + row.to(tl.int64)[:, None] * output_row + first_output + n[None, :]
    old = tl.load(place, mask=is_row[:, None] & is_output[None, :], other=0.0)  # used last
    sums = inner + row.to(tl.int64)[:, None] * W + matrix * width
    weights = up + start * N + (first_weight + n).to(tl.int64)[None, :] * width
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, width, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        is_column = r < width
        b = tl.load(weights + r[:, None], mask=is_column[:, None] & is_output[None, :], other=0.0)
        a = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for split in tl.static_range(S):
            a += tl.load(sums + tl.cast(T, tl.int64) * split * W + r[None, :],
                         mask=is_row[:, None] & is_column[None, :], other=0.0)  # fmt: skip
        total = tl.dot(a.to(b.dtype), b, total, input_precision="ieee")
    tl.store(place, (old.to(tl.float32) + total).to(output.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def group_rows(adapters: torch.Tensor, starts: torch.Tensor, widths: torch.Tensor) -> AdapterTiles:
    """Group the rows of a step by their adapters, int32 [T], numbered from 1; 0: none.

    ``starts`` and ``widths`` of the adapters' columns are int32 [A].
    """
    num_rows, num_adapters = len(adapters), len(starts)
    size = tile_rows(num_rows)
    num_tiles = min(num_rows, (num_rows + min(num_rows, num_adapters) * (size - 1)) // size)
    tiles = AdapterTiles(adapters.new_empty(num_tiles, size), adapters.new_empty(num_tiles, 2))
    if num_rows:
        _group[(num_adapters,)](
            adapters, starts, widths, *tiles, num_rows, num_tiles, A=num_adapters,
            BLOCK_A=next_power_of_2(num_adapters), BLOCK_T=_GROUPED, BLOCK_M=size,
        )  # fmt: skip
    return tiles


def shrink(
    x: torch.Tensor,
    down: torch.Tensor,
    tiles: AdapterTiles,
    *,
    num_matrices: int,
    max_columns: int,
    is_split: bool = True,
) -> torch.Tensor:
    """Products of x [T, K] with ``down`` [C * P, K], float32 [S, T, P * max_columns]; their sum over S is the result.

    The P matrices' rows of one adapter follow each other in ``down``, and so do their results in the first columns.
    The rest is undefined, as are rows without an adapter. Without ``is_split``, S is 1.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    (num_rows, num_inputs), width = x.shape, num_matrices * max_columns
    tile = shrink_tile(num_rows, width, x.dtype)
    split = split_size(num_inputs, _MOST_SPLITS if is_split else 1)
    inner = x.new_empty(cdiv(num_inputs, split), num_rows, width, dtype=torch.float32)
    if num_rows:
        _shrink[len(tiles.rows), cdiv(width, tile.num_columns), len(inner)](
            x, down, *tiles, inner, num_rows, num_inputs, width, x.stride(0), P=num_matrices,
            BLOCK_M=tiles.rows.shape[1], BLOCK_C=tile.num_columns, BLOCK_K=tile.num_inputs, SPLIT=split,
            num_stages=tile.num_stages,
        )  # fmt: skip
    return inner


def output_blocks(places: Sequence[tuple[int, int]], device: torch.device) -> OutputBlocks:
    """The blocks of P matrices: pairs of a matrix's first output in the whole product, and its number of outputs."""
    table: list[tuple[int, int, int, int]] = []
    num_outputs = 0
    for matrix, (first, size) in enumerate(places):
        table += [
            (matrix, num_outputs + n, first + n, min(_OUTPUTS, size - n)) for n in range(0, size, _OUTPUTS)
        ]  # fmt: skip
        num_outputs += size
    alignment = math.gcd(_ALIGNMENT, *(number for _, _, *numbers in table for number in numbers))
    return OutputBlocks(torch.tensor(table, dtype=torch.int32, device=device), num_outputs, alignment)


def expand_add(
    inner: torch.Tensor,
    up: torch.Tensor,
    tiles: AdapterTiles,
    blocks: OutputBlocks,
    output: torch.Tensor,
    *,
    max_columns: int,
) -> None:
    """Add the products of ``shrink``'s result with ``up`` to ``output`` [T, all outputs] in place; changes ``inner``.

    ``up`` [C * N] has the weights of one adapter after the other: for each of the N outputs as many as the adapter has
    columns.
    """
    num_splits, num_rows, width = inner.shape
    if num_rows > _FEW and num_splits > 1:  # else each of many programs would read all splits of its rows
        size = num_rows * width
        _add_splits[(cdiv(size, _ADDED),)](inner, size, S=num_splits, BLOCK=_ADDED)
        num_splits = 1
    if num_rows:
        _expand_add[len(tiles.rows), len(blocks.table)](
            inner, up, *tiles, blocks.table, output, num_rows, width, blocks.num_outputs, output.stride(0),
            S=num_splits, ALIGNMENT=blocks.alignment, BLOCK_M=tiles.rows.shape[1], BLOCK_N=_OUTPUTS,
            BLOCK_R=_columns(max_columns, _MOST_COLUMNS if up.itemsize <= 2 else _LEAST_COLUMNS),
            num_warps=tiles.rows.shape[1] // 4, num_stages=1,
        )  # fmt: skip
