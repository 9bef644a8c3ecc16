"""All adapters of a model side by side: what they add to a matrix product is two more, for all rows of a step at once.

Between the two a mask leaves each row its own adapter's columns. So shapes do not depend on who has which adapter,
nothing is read back from the device, and a graph can hold it all.

Axes: T tokens, K inputs, N outputs, C columns of all adapters together, P matrices that share their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .lora import Adapter, LowRank

_MULTIPLE = 8  # of an adapter's columns: rows of 16 bytes in half precision, as matrix products want them

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # x [T, K] and a weight [N, K] to [T, N]


class Columns:
    """Whose the columns are, in the stacked matrices of all layers alike: as many as each adapter's greatest rank."""

    def __init__(self, adapters: Sequence[Adapter], device: torch.device) -> None:
        ranks = [max(len(update.a) for update in adapter.updates.values()) for adapter in adapters]
        widths = torch.tensor([-(-rank // _MULTIPLE) * _MULTIPLE for rank in ranks])
        self.starts: list[int] = (widths.cumsum(0) - widths).tolist()
        self.count = int(widths.sum())
        numbers = torch.arange(1, len(adapters) + 1, dtype=torch.int32)
        self._owners = numbers.repeat_interleave(widths).to(device)

    def foreign_to(self, adapters: torch.Tensor) -> torch.Tensor:
        """Bool [T, C], the columns that are not those of each token's adapter, int32 [T], counted from 1; 0: none."""
        return adapters[:, None] != self._owners


class StackedLinear(NamedTuple):
    """What all adapters add to a product of matrices one below the other, or of one."""

    down: torch.Tensor  # [P * C, K], zeros where an adapter does not change a matrix
    ups: tuple[tuple[int, torch.Tensor], ...]  # of each of the P matrices: where its outputs begin, and [N, C]
    product: Product
    sum_ranks: Callable[[torch.Tensor], None] | None  # where each rank has a share of the inputs

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
        """Of each matrix: where its outputs begin, and what adapters add to it, by their index. None: nothing at all.

        It lies where ``like`` does, in its type.
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
        """To the product ``output`` [T, all N] of x [T, K], in place; ``foreign`` as ``Columns`` says.

        A row gets zeros of what is not its own. Filled in and not multiplied, they are zeros also where the others'
        adapters overflow.
        """
        inner = self.product(x, self.down).view(len(x), len(self.ups), -1).masked_fill_(foreign[:, None], 0)
        if self.sum_ranks is not None:
            self.sum_ranks(inner)
        for own, (start, up) in zip(inner.unbind(1), self.ups, strict=True):
            place = output[:, start : start + len(up)]
            if self.product is F.linear:
                place.addmm_(own, up.t())  # one launch, and rounded once
            else:
                place += self.product(own, up)
