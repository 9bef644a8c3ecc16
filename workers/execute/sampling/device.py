"""Sampling on the device without the host: fixed shapes and no branches on data, so that it fits in a CUDA graph.

Its tokens are those of ``draw``: exactly so where torch computes them, up to the rounding of sums where Triton does
(``kernels.triton_select``). Axes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ....protocol.arrays import Int32
from ..kernels.support import has_compiled_kernels
from ..scheduling.sequence import Sequence
from .draw import LEAST_TEMPERATURE, block_sums, in_order, invert, invert_whole, top_k_of
from .kinds import SamplingKind
from .rng import uniforms

NUM_COLUMNS = 5
_PART = 1 << 23  # logits that are sorted at once, at some hundred bytes of reserved memory each


class Sampled(NamedTuple):
    """What the device sampled. The token of a row whose greatest logit is not finite is meaningless."""

    token_ids: torch.Tensor  # int64 [R]
    greatest: torch.Tensor  # float32 [R]


def columns(sequences: Rows[Sequence], lengths: Int32, *, vocab_size: int) -> npt.NDArray[np.float64]:
    """Temperature, top-k, top-p, min-p and the random number of each row, float64 [5, R].

    ``lengths`` [R] are the tokens before the sampled ones: of a sequence with proposals, each row has its own.

    A greedy row has temperature 0; a disabled top-k is the size of the vocabulary.
    """
    table = np.empty((NUM_COLUMNS, len(sequences)))
    params = [sequence.params for sequence in sequences]
    table[0] = [p.temperature for p in params]
    table[1] = [top_k_of(p, vocab_size) for p in params]
    table[2] = [p.top_p for p in params]
    table[3] = [p.min_p for p in params]
    table[4] = uniforms([s.seed for s in sequences], lengths)
    return table


def sample(logits: torch.Tensor, table: torch.Tensor, kind: SamplingKind) -> Sampled:
    """The next tokens for logits float32 [R, V] and ``columns`` [5, R], which GREEDY does not read."""
    greatest, tokens = logits.max(dim=-1)
    if kind is SamplingKind.GREEDY:
        return Sampled(tokens, greatest)
    if has_compiled_kernels(logits.device):
        from ..kernels.triton_select import draw_rows  # which can be imported where Triton is installed

        draw_rows(logits, greatest, tokens, table, has_cuts=kind is SamplingKind.CUT)
        return Sampled(tokens, greatest)
    return Sampled(_drawn(logits, greatest, tokens, table, kind), greatest)


def _drawn(
    logits: torch.Tensor, greatest: torch.Tensor, tokens: torch.Tensor, table: torch.Tensor, kind: SamplingKind
) -> torch.Tensor:
    """``tokens`` [R], those of the greatest logits, with others for rows that have a temperature."""
    temperature, top_k, top_p, min_p, numbers = (column[:, None] for column in table)
    scores = (logits - greatest[:, None]) / temperature.float().clamp_min(LEAST_TEMPERATURE)
    drawn = invert_whole(_above(scores.exp(), min_p.float()), numbers)
    if kind is SamplingKind.CUT:
        is_cut = (top_k < logits.shape[1]) | (top_p < 1)
        size = max(1, _PART // logits.shape[1])
        parts = zip(torch.split(scores, size), torch.split(table, size, dim=1), strict=True)
        drawn = torch.where(is_cut[:, 0], torch.cat([_draw_cut(*part) for part in parts]), drawn)
    # A row with NaNs may point anywhere, and its token is the next step's input before the host can check it.
    drawn = drawn.clamp(0, logits.shape[1] - 1)
    return torch.where(temperature[:, 0] > 0, drawn, tokens)


def _above(weights: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    return torch.where(weights < least, 0.0, weights)


def _draw_cut(scores: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Tokens int64 [R] after top-k and top-p, from the whole sorted vocabulary. See ``draw.cut_candidates``."""
    _, top_k, top_p, min_p, numbers = (column[:, None] for column in table)
    vocab_size = scores.shape[1]
    values, ids = in_order(scores, vocab_size)
    weights = values.exp().double()
    kth = values.gather(1, top_k.long().clamp(1, vocab_size) - 1)
    is_kept = (values >= kth) | (top_k >= vocab_size)
    mass = torch.where(is_kept, weights, 0.0).cumsum(dim=-1)
    whole = block_sums(scores.exp()).cumsum(dim=-1, dtype=torch.float64)[:, -1:]
    total = torch.where(top_k >= vocab_size, whole, mass[:, -1:])
    is_kept &= (mass - weights < top_p * total) | (top_p >= 1)
    is_kept[:, 0] = True  # with top_p 0 too
    is_kept &= weights >= min_p.float()
    places = invert(torch.where(is_kept, weights, 0.0), numbers)
    return ids.gather(1, places[:, None])[:, 0]
