"""All adapters of a model side by side: two extra matrix products apply them to all rows of a step at once.

Between the two, a mask keeps only the columns of each row's own adapter. So shapes do not depend on which row has which
adapter, nothing is read back from the device, and a graph can capture all of it.

Axes: T tokens, K inputs, N outputs, C columns of all adapters together, P matrices that share their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .lora import Adapter, LowRank

_MULTIPLE = 8  # columns per adapter are padded to this: 16 bytes in half precision, as matrix products require

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # x [T, K] and a weight [N, K] to [T, N]


class Columns:
    """The columns of each adapter, the same in the stacked matrices of all layers: as many as its greatest rank, or a
    few more as padding.
    """

    def __init__(self, adapters: Sequence[Adapter], device: torch.device) -> None:
        ranks = [max(len(update.a) for update in adapter.updates.values()) for adapter in adapters]
        widths = torch.tensor([-(-rank // _MULTIPLE) * _MULTIPLE for rank in ranks])
        self.starts: list[int] = (widths.cumsum(0) - widths).tolist()
        self.count = int(widths.sum())
        numbers = torch.arange(1, len(adapters) + 1, dtype=torch.int32)
        self._owners = numbers.repeat_interleave(widths).to(device)

    def foreign_to(self, adapters: torch.Tensor) -> torch.Tensor:
        """Bool [T, C]: the columns that do not belong to the token's adapter, int32 [T], numbered from 1; 0: none."""
        return adapters[:, None] != self._owners


class StackedLinear(NamedTuple):
    """The updates of all adapters to the product with one matrix, or with several stacked vertically."""

    down: torch.Tensor  # [P * C, K], zeros where an adapter does not change a matrix
    ups: tuple[tuple[int, torch.Tensor], ...]  # for each of the P matrices: first output, and [N, C]
    product: Product
    sum_ranks: Callable[[torch.Tensor], None] | None  # set if each rank has a share of the inputs

    @classmethod
    def stack(
        cls,
        matrices: Iterable[tuple[int, Mapping[int, LowRank]]],
        columns: Columns,
        *,
        like: torch.Tensor,
        product: Product = F.linear,
        sum_ranks: Callable[[torch.Tensor], None] | None = None,
    ) -> StackedLinear | None:
        """Stack the updates to ``matrices``: pairs (first output, updates by adapter index). None if there are none.

        The result has the device and the type of ``like``.
        """
        downs, ups = [], []
        for first_output, updates in matrices:
            if not updates:
                continue
            num_inputs, num_outputs = next((a.shape[1], len(b)) for a, b in updates.values())
            down, up = like.new_zeros(columns.count, num_inputs), like.new_zeros(num_outputs, columns.count)
            for index, (a, b) in updates.items():
                own = slice(columns.starts[index], columns.starts[index] + len(a))
                down[own], up[:, own] = a.to(like), b.to(like)
            downs.append(down)
            ups.append((first_output, up))
        return cls(torch.cat(downs), tuple(ups), product, sum_ranks) if ups else None

    def add(self, x: torch.Tensor, output: torch.Tensor, foreign: torch.Tensor) -> None:
        """Add the updates for x [T, K] to the product ``output`` [T, all N], in place; for ``foreign`` see ``Columns``.

        A row gets zeros for foreign columns. They are filled in rather than multiplied, so that they are zeros even if
        the other adapters overflow.
        """
        inner = self.product(x, self.down).view(len(x), len(self.ups), -1).masked_fill_(foreign[:, None], 0)
        if self.sum_ranks is not None:
            self.sum_ranks(inner)
        for own, (start, up) in zip(inner.unbind(1), self.ups, strict=True):
            place = output[:, start : start + len(up)]
            if self.product is F.linear:
                place.addmm_(own, up.t())  # one launch and one rounding
            else:
                place += self.product(own, up)
