"""Paged attention by definition: the reference for tests, and the kernel on devices that have no better one."""

from __future__ import annotations

import torch

from ..step import StepInputs
from .eight_bits import read_pages, write_tokens
from .interface import AttentionForm, LayerCache


class ReferenceAttention:
    """Computes one sequence at a time, in float32 or wider. Shapes and names are those of ``interface``."""

    def begin_step(self, inputs: StepInputs) -> None:
        self._inputs = inputs

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        slots = torch.from_numpy(self._inputs.slot_mapping).to(key.device)
        if cache.scales is not None:
            write_tokens(cache, slots, key, value)
            return
        cache.keys.flatten(0, 1)[slots] = key
        cache.values.flatten(0, 1)[slots] = value

    def attend(self, cache: LayerCache, query: torch.Tensor, form: AttentionForm) -> torch.Tensor:
        starts, tables = self._inputs.query_starts.tolist(), torch.from_numpy(self._inputs.block_tables)
        outputs = []
        for s, length in enumerate(self._inputs.context_lens.tolist()):
            table = tables[s, : -(-length // cache.keys.shape[1])].to(query.device)
            keys, values = (part[:length] for part in _read(cache, table))
            outputs.append(_attend(query[starts[s] : starts[s + 1]], keys, values, form))
        return torch.cat(outputs)


def _read(cache: LayerCache, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all tokens of some pages."""
    if cache.scales is not None:
        return read_pages(cache, table)
    return cache.keys[table].flatten(0, 1), cache.values[table].flatten(0, 1)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, form: AttentionForm) -> torch.Tensor:
    """The last n of L tokens attend to all before them: [n, H, D], [L, J, D], [L, J, E] -> [n, H, E]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = (x.to(wide).repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (keys, values))
    scores = torch.einsum("nhd,lhd->hnl", query.to(wide), keys) * form.scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    positions = torch.arange(len(keys), device=query.device)
    distances = positions[-len(query) :, None] - positions  # [n, L], from key to query
    scores = scores.masked_fill((distances < 0) | (distances >= (form.sliding_window or len(keys))), -torch.inf)
    if form.sinks is not None:
        scores = torch.cat([scores, form.sinks.to(wide)[:, None, None].expand(-1, len(query), 1)], dim=-1)
    return torch.einsum("hnl,lhe->nhe", scores.softmax(dim=-1)[..., : len(keys)], values).to(query.dtype)
