"""The logprobs that requests want with their tokens, from the logits before they are changed.

Axes: N rows, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as Rows
from itertools import groupby
from typing import NamedTuple

import torch

from ..scheduling.sequence import Sequence
from ..step import TokenLogprobs


class Logprobs(NamedTuple):
    """Logprobs of rows that want the same number of alternatives."""

    rows: list[int]  # of the step
    chosen: torch.Tensor  # float32 [N], of the chosen tokens
    token_ids: torch.Tensor  # int32 [N, K], the K most likely tokens, best first
    values: torch.Tensor  # float32 [N, K]

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Logprobs:
        return Logprobs(self.rows, *(move(column) for column in self[1:]))


def wanted_logprobs(sequences: Rows[Sequence]) -> dict[int, int]:
    """How many alternatives each row wants, ordered by that number; rows without logprobs are left out."""
    counts = {row: s.params.logprobs for row, s in enumerate(sequences) if s.params.logprobs is not None}
    return dict(sorted(counts.items(), key=lambda item: item[1]))


def find_logprobs(raw: torch.Tensor, tokens: torch.Tensor, counts: Mapping[int, int]) -> list[Logprobs]:
    """Logprobs of the chosen ``tokens`` int64 [N] and of the most likely ones, from the raw log-softmax [N, V] of the
    rows of ``wanted_logprobs``, in its order.

    Rows that want equally many are processed together, as every transfer waits for the device; those that want another
    number are not, so that no row's alternatives depend on what others want.
    """
    found, start = [], 0
    for count, group in groupby(counts, key=counts.__getitem__):
        rows = list(group)
        part, chosen = raw[start : start + len(rows)], tokens[start : start + len(rows)]
        best = part.topk(min(count, raw.shape[1]))
        found.append(Logprobs(rows, part.gather(1, chosen[:, None])[:, 0], best.indices.int(), best.values))
        start += len(rows)
    return found


def logprobs_by_row(found: Iterable[Logprobs], *, failed: Container[int]) -> dict[int, TokenLogprobs]:
    """What each row gets, by rising row, ``failed`` rows left out. The tensors must be on the host."""
    rows = {
        row: TokenLogprobs(own, ids, values)
        for group in found
        for row, own, ids, values in zip(
            group.rows, group.chosen.tolist(), group.token_ids.numpy(), group.values.numpy(), strict=True
        )
    }
    return {row: rows[row] for row in sorted(rows) if row not in failed}
