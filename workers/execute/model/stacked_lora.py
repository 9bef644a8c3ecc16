"""All adapters of a model side by side, where Triton's kernels do not run: two more products apply them to all rows.

Between the two, a mask keeps only the columns of each row's own adapter, so every step reads and computes all adapters.

Axes: T tokens, K inputs, N outputs, C columns of all adapters together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .lora import Adapter, Columns, LowRank


class StackedLinear(NamedTuple):
    """The updates of all adapters to the product with one matrix."""

    down: torch.Tensor  # [C, K]
    up: torch.Tensor  # [N, C]
    sum_ranks: Callable[[torch.Tensor], None] | None  # set if each rank has a share of the inputs

    def add(self, x: torch.Tensor, output: torch.Tensor, foreign: torch.Tensor) -> None:
        """Add the updates for x [T, K] to the product ``output`` [T, N], in place.

        A row gets zeros for ``foreign`` columns, bool [T, C]. They are filled in rather than multiplied, so that they
        are zeros even if the other adapters overflow.
        """
        inner = F.linear(x, self.down).masked_fill_(foreign, 0)
        if self.sum_ranks is not None:
            self.sum_ranks(inner)
        output.addmm_(inner, self.up.t())  # one rounding


class StackedAdapters:
    """The layout of all adapters' weights for torch's products, on one device."""

    def __init__(self, adapters: Sequence[Adapter], device: torch.device) -> None:
        self._columns = Columns(adapters)
        numbers = torch.arange(1, len(adapters) + 1, dtype=torch.int32)
        self._owners = numbers.repeat_interleave(torch.tensor(self._columns.widths)).to(device)

    def rows_of(self, adapters: torch.Tensor) -> torch.Tensor:
        """Bool [T, C]: the columns that do not belong to the token's adapter, int32 [T], numbered from 1; 0: none."""
        return adapters[:, None] != self._owners

    def stack(
        self,
        updates: Mapping[int, LowRank],
        *,
        like: torch.Tensor,
        sum_ranks: Callable[[torch.Tensor], None] | None = None,
    ) -> StackedLinear:
        """Stack the updates to one matrix, by adapter index, on the device and in the type of ``like``."""
        num_inputs, num_outputs = next((a.shape[1], len(b)) for a, b in updates.values())
        down, up = like.new_zeros(self._columns.count, num_inputs), like.new_zeros(num_outputs, self._columns.count)
        for index, (a, b) in updates.items():
            own = slice(self._columns.starts[index], self._columns.starts[index] + len(a))
            down[own], up[:, own] = a.to(like), b.to(like)
        return StackedLinear(down, up, sum_ranks)
