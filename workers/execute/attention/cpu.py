"""Paged attention on a CPU, built from torch's own operators.

Axes are those of ``interface``, and: B sequences that run in one call, n query tokens and L keys of each, and
G = H / J query heads that share a key head (keys are never repeated for them).

Keys are gathered by slot rather than by page, for two reasons: a copy holds no more than the tokens that count, and
padding can repeat a token of the same sequence. So no other sequence's data is ever read: a NaN that another
sequence left in a page, or that padding wrote to the trash page, cannot leak through a masked score.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ....protocol.arrays import Int64
from ..step import StepInputs
from .interface import AttentionForm, LayerCache

_MAX_GROUP_KEYS = 16_384  # keys gathered at once: bounds the copies of a decode group with long contexts
_SMALL_CONTEXT_BITS = 7  # contexts of up to 128 keys decode together, whatever their lengths


class _Group(NamedTuple):
    """Queries that run in one call: decodes of similar context (n = 1), or one prefill chunk (B = 1)."""

    queries: slice | torch.Tensor  # which of the step's T tokens
    num_seqs: int  # B
    slots: torch.Tensor  # int64 [B * L], of the keys
    mask: torch.Tensor | None  # bool [B, 1, n, L], True attends; None: all attend
    is_causal: bool = False  # the mask is the plain triangle, which has a faster kernel


class CpuAttention:
    """Groups the work of a step once per sliding window, for all layers with that window."""

    def begin_step(self, inputs: StepInputs) -> None:
        self._inputs = inputs
        self._slot_mapping = torch.from_numpy(inputs.slot_mapping)
        self._groups: dict[int | None, list[_Group]] = {}  # by sliding window

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        cache.keys.flatten(0, 1).index_copy_(0, self._slot_mapping, key)
        cache.values.flatten(0, 1).index_copy_(0, self._slot_mapping, value)

    def attend(self, cache: LayerCache, query: torch.Tensor, form: AttentionForm) -> torch.Tensor:
        window = form.sliding_window
        groups = self._groups.get(window)
        if groups is None:
            groups = self._groups[window] = _groups(self._inputs, window, page_size=cache.keys.shape[1])
        if len(groups) == 1 and isinstance(groups[0].queries, slice):
            return _attend(groups[0], cache, query, form)
        output = query.new_empty(*query.shape[:2], cache.values.shape[-1])
        for group in groups:
            output[group.queries] = _attend(group, cache, query[group.queries], form)
        return output


def _groups(inputs: StepInputs, window: int | None, *, page_size: int) -> list[_Group]:
    """The step's work, with each query in one group."""
    decodes = [_decodes(inputs, rows, window, page_size) for rows in _similar_decodes(inputs, window)]
    chunks = [_chunk(inputs, s, window, page_size) for s in range(inputs.num_decodes, len(inputs.context_lens))]
    return decodes + chunks


def _similar_decodes(inputs: StepInputs, window: int | None) -> list[Int64]:
    """The step's decodes, grouped by their number of keys rounded up to a power of two."""
    contexts = inputs.context_lens[: inputs.num_decodes].tolist()
    members = defaultdict(list)
    for s, context in enumerate(contexts):
        num_keys = min(context, window or context)
        members[max((num_keys - 1).bit_length(), _SMALL_CONTEXT_BITS)].append(s)
    groups = []
    for bits, rows in members.items():
        size = max(1, _MAX_GROUP_KEYS >> bits)
        groups += [np.array(rows[i : i + size], dtype=np.int64) for i in range(0, len(rows), size)]
    return groups


def _decodes(inputs: StepInputs, rows: Int64, window: int | None, page_size: int) -> _Group:
    contexts = inputs.context_lens[rows].astype(np.int64)[:, None]
    num_keys = np.minimum(contexts, window) if window else contexts
    # Beyond its own keys, a row repeats its last token, whose key this very step has written.
    offsets = np.arange(num_keys.max())
    positions = contexts - num_keys + np.minimum(offsets, num_keys - 1)
    mask = None if (num_keys == num_keys[0]).all() else torch.from_numpy(offsets < num_keys)[:, None, None]
    queries = slice(0, len(rows)) if len(rows) == inputs.num_decodes else torch.from_numpy(rows)
    return _Group(queries, len(rows), _slots(inputs.block_tables[rows], positions, page_size), mask)


def _chunk(inputs: StepInputs, s: int, window: int | None, page_size: int) -> _Group:
    start, end = inputs.query_starts[s : s + 2].tolist()
    context = int(inputs.context_lens[s])
    first_query = context - (end - start)
    keys = np.arange(max(0, first_query - window + 1) if window else 0, context)
    queries = np.arange(first_query, context)[:, None]
    mask = keys <= queries  # [n, L]
    if window:
        mask &= keys > queries - window
    slots = _slots(inputs.block_tables[s : s + 1], keys[None], page_size)
    is_causal = first_query == 0 and (not window or context <= window)
    return _Group(slice(start, end), 1, slots, torch.from_numpy(mask)[None, None], is_causal)


def _slots(block_tables: npt.NDArray[np.int32], positions: Int64, page_size: int) -> torch.Tensor:
    """Slots of the tokens at ``positions`` [B, L] of the sequences with ``block_tables`` [B, pages]: int64 [B * L]."""
    pages = np.take_along_axis(block_tables, positions // page_size, axis=1).astype(np.int64)
    return torch.from_numpy((pages * page_size + positions % page_size).ravel())


def _attend(group: _Group, cache: LayerCache, query: torch.Tensor, form: AttentionForm) -> torch.Tensor:
    """Outputs [B * n, H, E] of the group's queries [B * n, H, D]."""
    num_seqs, num_kv_heads = group.num_seqs, cache.keys.shape[2]
    num_tokens, num_heads, key_dim = query.shape
    k, v = (
        pages.flatten(0, 1).index_select(0, group.slots).view(num_seqs, -1, *pages.shape[2:]).transpose(1, 2)
        for pages in (cache.keys, cache.values)
    )  # [B, J, L, D], [B, J, L, E]
    q = query.view(num_seqs, num_tokens // num_seqs, num_kv_heads, -1, key_dim).permute(0, 2, 3, 1, 4)
    kernel = _fused if form.softcap is None and form.sinks is None else _by_hand
    return kernel(q, k, v, group, form).permute(0, 3, 1, 2, 4).reshape(num_tokens, num_heads, -1)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: _Group, form: AttentionForm) -> torch.Tensor:
    """Attention of q [B, J, G, n, D] by torch's fused kernel: [B, J, G, n, E]."""
    if q.shape[3] == 1:  # the G queries of a key head are the rows of one small matrix product
        return F.scaled_dot_product_attention(q.squeeze(3), k, v, group.mask, scale=form.scale).unsqueeze(3)
    # Key heads become the batch, and each key is expanded to G heads with a stride of 0: nothing is copied.
    k, v = (x.transpose(0, 1).expand(-1, q.shape[2], -1, -1) for x in (k, v))
    mask = None if group.is_causal else group.mask
    return F.scaled_dot_product_attention(q[0], k, v, mask, is_causal=group.is_causal, scale=form.scale)[None]


def _by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: _Group, form: AttentionForm) -> torch.Tensor:
    """Attention of q [B, J, G, n, D] with what the fused kernel lacks, a soft cap (Gemma 2) or sinks (gpt-oss)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.flatten(2, 3) @ k.mT).to(wide).view(*q.shape[:4], -1) * form.scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    if group.mask is not None:
        scores = scores.masked_fill(~group.mask[:, None], -torch.inf)
    if form.sinks is not None:
        sinks = form.sinks.view(1, *q.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks.to(wide)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]].to(v.dtype)
    output: torch.Tensor = weights.flatten(2, 3) @ v
    return output.view(*q.shape[:4], -1)
