"""Draws one token per row by temperature, top-k, top-p and min-p, with a given random number.

Every operation treats rows independently, so a row's token depends only on its own logits, parameters and number: it is
bit for bit the same alone and in any batch. To that end a row is summed in blocks of fixed size (a plain ``sum`` splits
a long row over threads when it is alone), and ties have one order: descending logit, then ascending token id.

Axes: R rows, V vocabulary, C candidates (the C greatest logits of a row, in order), N blocks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....protocol.sampling import SamplingParams

_BLOCK = 128  # logits of a row that are reduced at once
_FIRST_CANDIDATES = 128  # of V; eight times as many whenever they turn out to be too few
LEAST_TEMPERATURE = 1e-10  # below it a quotient could overflow; the greatest logit has all the weight anyway


class Filters(NamedTuple):
    """Parameters of the rows to draw, each a tensor [R, 1] on the logits' device."""

    temperature: torch.Tensor  # float32, above 0
    top_k: torch.Tensor  # int64, V if disabled
    top_p: torch.Tensor  # float64, 1 if disabled
    min_p: torch.Tensor  # float32, 0 if disabled

    def of(self, rows: torch.Tensor | slice) -> Filters:
        return Filters(*(parameter[rows] for parameter in self))


def top_k_of(params: SamplingParams, vocab_size: int) -> int:
    """How many of the greatest logits may be drawn; all of them if top-k is disabled."""
    return min(params.top_k, vocab_size) if params.top_k is not None and params.top_k > 0 else vocab_size


class _Candidates(NamedTuple):
    token_ids: torch.Tensor  # int64 [R, C]
    weights: torch.Tensor  # float64 [R, C], proportional to the probability; exactly 0 where filtered out
    complete: torch.Tensor  # bool [R], whether no token outside the candidates could change the row


def draw(logits: torch.Tensor, filters: Filters, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [R], drawn from logits float32 [R, V] with the random numbers ``uniforms`` float64 [R, 1].

    The greatest logit of a row must be finite; a logit of -inf is never drawn.
    """
    greatest = logits.amax(dim=-1, keepdim=True)
    scores = (logits - greatest).div_(filters.temperature.clamp_min(LEAST_TEMPERATURE))
    is_cut = ((filters.top_k < logits.shape[1]) | (filters.top_p < 1))[:, 0]
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for rows in _chosen(~is_cut):
        weights = whole_weights(scores[rows], filters.of(rows))
        tokens[rows] = invert_whole(weights, uniforms[rows])
    for rows in _chosen(is_cut):
        tokens[rows] = _draw_cut(scores[rows], filters.of(rows), uniforms[rows], _FIRST_CANDIDATES)
    return tokens


def _chosen(mask: torch.Tensor) -> list[torch.Tensor | slice]:
    """The rows of a mask [R] as at most one index. All of them become a slice, as indexing by numbers would copy."""
    rows = mask.nonzero()[:, 0]
    return [slice(None) if len(rows) == len(mask) else rows] if len(rows) else []


def whole_weights(scores: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Weights float32 [R, V] of rows with neither top-k nor top-p. Scores are relative to the greatest."""
    weights = scores.exp()
    return weights.masked_fill_(weights < filters.min_p, 0.0) if filters.min_p.any() else weights


def _draw_cut(scores: torch.Tensor, filters: Filters, uniforms: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """Rows with top-k or top-p. Few candidates suffice for most rows; the others are drawn again from more."""
    candidates = cut_candidates(scores, filters, num_candidates)
    places = invert(candidates.weights, uniforms)
    tokens = candidates.token_ids.gather(1, places[:, None])[:, 0]
    rest = (~candidates.complete).nonzero()[:, 0]
    if len(rest):
        tokens[rest] = _draw_cut(scores[rest], filters.of(rest), uniforms[rest], 8 * num_candidates)
    return tokens


def cut_candidates(scores: torch.Tensor, filters: Filters, num_candidates: int) -> _Candidates:
    """The ``num_candidates`` greatest of scores float32 [R, V] (relative to the greatest), and what the filters keep.

    Top-k keeps all that tie with the k-th; top-p keeps the token that crosses the threshold, as in transformers.
    """
    vocab_size = scores.shape[1]
    values, ids = in_order(scores, min(num_candidates, vocab_size))
    weights = values.exp().double()
    kth = values.gather(1, (filters.top_k - 1).clamp_max(values.shape[1] - 1))
    is_kept = (values >= kth) | (filters.top_k >= vocab_size)
    mass = torch.where(is_kept, weights, 0.0).cumsum(dim=-1)
    total = _total(scores, mass, filters.top_k)
    is_kept &= (mass - weights < filters.top_p * total) | (filters.top_p >= 1)
    is_kept[:, 0] = True  # with top_p 0 too
    is_kept &= weights >= filters.min_p
    # No token outside the candidates is above the last of them, so none matters while what is kept (and what top-p
    # takes its share of) is strictly above it.
    last = values[:, -1]
    lowest_kept = values.masked_fill(~is_kept, torch.inf).amin(dim=-1)
    # None outside has weight if the last has none, as under a grammar that allows only a few tokens.
    is_settled = (filters.top_k[:, 0] >= vocab_size) | ((filters.top_k[:, 0] <= values.shape[1]) & (kth[:, 0] > last))
    complete = (lowest_kept > last) & is_settled | (last == -torch.inf) | (values.shape[1] == vocab_size)
    return _Candidates(ids, torch.where(is_kept, weights, 0.0), complete)


def _total(scores: torch.Tensor, mass: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """What top-p is a fraction of: the weight of what top-k kept, or of the whole row. float64 [R, 1]."""
    total = mass[:, -1:].clone()
    for whole in _chosen(top_k[:, 0] >= scores.shape[1]):
        total[whole] = block_sums(scores[whole].exp()).cumsum(dim=-1, dtype=torch.float64)[:, -1:]
    return total


def in_order(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` greatest scores and their token ids, [R, count] each; ties by ascending token id."""
    if count == scores.shape[1]:  # already in the order of their ids, which a stable sort keeps among equals
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids
    likely = _likely(scores, count)
    places = scores.gather(1, likely).topk(count, dim=-1, sorted=False).indices
    ids = likely.gather(1, places).sort(dim=-1).values
    values, places = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, places)


def _likely(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [R, L] that include the ``count`` greatest: those of the ``count`` blocks with the greatest maxima.

    No token outside these blocks exceeds the least of their maxima, and at least ``count`` tokens reach it.
    """
    num_rows, vocab_size = scores.shape
    num_blocks, rest = divmod(vocab_size, _BLOCK)
    if 4 * count > num_blocks:  # the blocks would be most of the row
        return torch.arange(vocab_size, device=scores.device).expand(num_rows, -1)
    greatest = scores[:, : vocab_size - rest].reshape(num_rows, num_blocks, _BLOCK).amax(dim=-1)
    blocks = greatest.topk(count, dim=-1, sorted=False).indices
    ids = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=scores.device)).view(num_rows, -1)
    last = torch.arange(vocab_size - rest, vocab_size, device=scores.device).expand(num_rows, -1)
    return torch.cat([ids, last], dim=-1)


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first place in each row where the cumulative weight exceeds ``uniform * total``: int64 [R].

    A place of weight 0 is never chosen, as its cumulative weight is that of the place before. A place exists:
    uniform <= 1 - 2**-53 keeps the product below the total.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    places = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return places[:, 0].clamp_max(weights.shape[1] - 1)


def invert_whole(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """``invert`` for whole rows: first the block, then the place in it.

    A cumulative sum over the whole row takes twenty times as long as the block sums, as it cannot be vectorised.
    """
    cumulative = block_sums(weights).cumsum(dim=-1, dtype=torch.float64)
    target = uniforms * cumulative[:, -1:]
    blocks = torch.searchsorted(cumulative, target, right=True).clamp_max(cumulative.shape[1] - 1)
    before = torch.where(blocks > 0, cumulative.gather(1, (blocks - 1).clamp_min(0)), 0.0)
    ids = blocks * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp_max(weights.shape[1] - 1)).double()
    inside = torch.where(ids < weights.shape[1], inside, 0.0).cumsum(dim=-1)
    places = torch.searchsorted(inside, target - before, right=True)
    # The two sums of a block can differ in their last bits; then the last place with a weight is taken.
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    return (blocks * _BLOCK + torch.minimum(places, last))[:, 0]


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums float32 [R, N] of float32 [R, V]; the last block may be shorter."""
    num_rows, vocab_size = weights.shape
    whole = vocab_size - vocab_size % _BLOCK
    sums = weights[:, :whole].reshape(num_rows, -1, _BLOCK).sum(dim=-1)
    return torch.cat([sums, weights[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
