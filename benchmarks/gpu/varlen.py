"""A competitor of ours: torch's own FlashAttention, where its function supports block tables (2.12 and later)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from triptych.workers.execute.attention.interface import AttentionForm, LayerCache
from triptych.workers.execute.attention.triton import TritonAttention

Varlen = Callable[..., Any]


def find_varlen() -> Varlen | None:
    """torch's function for ragged batches if it can read pages, else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None


class VarlenAttention(TritonAttention):
    """Attends through ``varlen``; what that does not support (soft caps, sinks, half of the dtypes, keys in eight bits)
    stays with Triton.
    """

    def __init__(self, device: torch.device, varlen: Varlen) -> None:
        super().__init__(device)
        self._varlen = varlen

    def attend(self, cache: LayerCache, query: torch.Tensor, form: AttentionForm) -> torch.Tensor:
        is_known = form.softcap is None and form.sinks is None and query.dtype in (torch.float16, torch.bfloat16)
        if not is_known or cache.scales is not None:
            return super().attend(cache, query, form)
        step = self._step
        # Keys to the left of a token's own; -1 means all. Keys to the right are never seen.
        num_left = -1 if form.sliding_window is None else form.sliding_window - 1
        output: torch.Tensor = self._varlen(
            query.contiguous(),
            cache.keys,
            cache.values,
            step.query_starts,
            None,
            max(1, step.max_query_len),
            step.block_tables.shape[1] * cache.keys.shape[1],
            scale=form.scale,
            window_size=(num_left, 0),
            enable_gqa=query.shape[1] != cache.keys.shape[2],
            seqused_k=step.context_lens,
            block_table=step.block_tables,
        )
        return output
