"""All adapters of a model for Triton's kernels: the weights of each lie together, so that no row reads another's.

Axes: A adapters, C columns of all of them together, T tokens, K inputs, N outputs of the P matrices that share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.triton_lora import AdapterTiles, OutputBlocks, expand_add, group_rows, output_blocks, shrink
from .lora import Adapter, Columns, LowRank


class GroupedLinear(NamedTuple):
    """The updates of all adapters to the product with one matrix, or with several stacked vertically."""

    down: torch.Tensor  # [C * P, K]; of each adapter its columns of one matrix after the other
    up: torch.Tensor  # [C * N]; of each adapter its columns of one output after the other
    blocks: OutputBlocks
    num_matrices: int
    max_columns: int
    sum_ranks: Callable[[torch.Tensor], None] | None  # set if each rank has a share of the inputs
    stream: Any  # torch.cuda.Stream, None on a CPU

    def product(
        self, product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tiles: AdapterTiles
    ) -> torch.Tensor:
        """The product of x [T, K], [T, all N], with the updates, each row's own.

        In a graph, the first kernel runs beside the product, which hides most of it. Otherwise to fork and join would
        take the host longer.
        """
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            output = product(x)
            self.add(x, output, tiles)
            return output
        current = torch.cuda.current_stream(x.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            inner = self._shrink(x, tiles)
        output = product(x)
        current.wait_stream(self.stream)
        self._expand(inner, output, tiles)
        return output

    def add(self, x: torch.Tensor, output: torch.Tensor, tiles: AdapterTiles) -> None:
        """Add the updates for x [T, K] to the product ``output`` [T, all N], in place, each row's own."""
        self._expand(self._shrink(x, tiles), output, tiles)

    def _shrink(self, x: torch.Tensor, tiles: AdapterTiles) -> torch.Tensor:
        inner = shrink(
            x,
            self.down,
            tiles,
            num_matrices=self.num_matrices,
            max_columns=self.max_columns,
            is_split=self.sum_ranks is None,
        )
        if self.sum_ranks is not None:
            self.sum_ranks(inner)
        return inner

    def _expand(self, inner: torch.Tensor, output: torch.Tensor, tiles: AdapterTiles) -> None:
        expand_add(inner, self.up, tiles, self.blocks, output, max_columns=self.max_columns)


class GroupedAdapters:
    """The layout of all adapters' weights for the kernels, on one device."""

    def __init__(self, adapters: Sequence[Adapter], device: torch.device) -> None:
        self._columns = Columns(adapters)
        self._starts, self._widths = (
            torch.tensor(each, dtype=torch.int32, device=device)
            for each in (self._columns.starts, self._columns.widths)
        )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def rows_of(self, adapters: torch.Tensor) -> AdapterTiles:
        """Group the tokens of a step by their adapters, int32 [T], numbered from 1; 0: none."""
        return group_rows(adapters, self._starts, self._widths)

    def stack(
        self,
        updates: Mapping[int, LowRank],
        *,
        like: torch.Tensor,
        sum_ranks: Callable[[torch.Tensor], None] | None = None,
    ) -> GroupedLinear:
        """Lay out the updates to one matrix, by adapter index, on the device and in the type of ``like``."""
        return self.stack_merged([(0, updates)], like=like, sum_ranks=sum_ranks)

    def stack_merged(
        self,
        matrices: Iterable[tuple[int, Mapping[int, LowRank]]],
        *,
        like: torch.Tensor,
        sum_ranks: Callable[[torch.Tensor], None] | None = None,
    ) -> GroupedLinear:
        """The same for several ``matrices`` with the same inputs: pairs (first output, updates). Some have updates."""
        changed = [(first, updates) for first, updates in matrices if updates]
        each = [next(iter(updates.values())) for _, updates in changed]
        places = [(first, len(b)) for (first, _), (_, b) in zip(changed, each, strict=True)]
        blocks, columns = output_blocks(places, like.device), self._columns
        down = like.new_zeros(len(changed) * columns.count, each[0].a.shape[1])
        up = like.new_zeros(blocks.num_outputs * columns.count)
        for matrix, (_, updates) in enumerate(changed):
            num_before = sum(size for _, size in places[:matrix])
            for index, (a, b) in updates.items():
                start, width = columns.starts[index], columns.widths[index]
                down[len(changed) * start + matrix * width :][: len(a)] = a.to(like)
                own = up[blocks.num_outputs * start :][: blocks.num_outputs * width].view(-1, width)
                own[num_before:][: len(b), : len(a)] = b.to(like)
        return GroupedLinear(down, up, blocks, len(changed), max(columns.widths), sum_ranks, self._stream)
