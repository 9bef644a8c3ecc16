"""Attention of prompts on Hopper by a kernel of its own, where there is one. Axes are those of ``interface``."""

from __future__ import annotations

import logging
from types import ModuleType

import torch

from ..kernels.sizes import cdiv
from ..kernels.support import is_hopper
from .device_step import DeviceStep
from .interface import AttentionForm, LayerCache

logger = logging.getLogger(__name__)


class HopperChunks:
    """What the kernel for any GPU would do for plain prompts that occupy all multiprocessors, faster and differently
    rounded.
    """

    def __init__(self, device: torch.device, num_processors: int) -> None:
        self._num_processors = num_processors
        self._kernel = _kernel() if is_hopper(device) else None

    def attend(
        self, cache: LayerCache, query: torch.Tensor, output: torch.Tensor, form: AttentionForm, step: DeviceStep
    ) -> bool:
        """Write the outputs of the last tokens of the step, queries [n, H, D], and say whether this was done.

        It depends on nothing that differs when a graph is replayed.
        """
        if self._kernel is None or not self._suits(self._kernel, cache, query, form):
            return False
        num_decodes = len(step.token_ids) - len(query)
        try:
            self._kernel.hopper_attention(
                query,
                cache.keys,
                cache.values,
                output,
                block_tables=step.block_tables[num_decodes:],
                context_lens=step.context_lens[num_decodes:],
                query_starts=step.query_starts[num_decodes:],
                scale=form.scale,
                num_processors=self._num_processors,
            )
        except Exception as error:  # Gluon is experimental: another Triton may lack what the kernel is written in
            logger.warning(
                "attention of prompts takes half as long again, as its kernel for Hopper failed: %s: %s",
                type(error).__name__,
                str(error)[:300],
            )
            self._kernel = None
            return False
        return True

    def _suits(self, kernel: ModuleType, cache: LayerCache, query: torch.Tensor, form: AttentionForm) -> bool:
        if form.sliding_window is not None or form.softcap is not None or form.sinks is not None:
            return False
        if cache.scales is not None or not kernel.suits_hopper(query, cache.keys, cache.values):
            return False
        (num_tokens, num_heads, _), num_kv_heads = query.shape, cache.keys.shape[2]
        num_tiles = cdiv(num_tokens * num_heads // num_kv_heads, kernel.NUM_ROWS)
        return num_tiles * num_kv_heads >= self._num_processors


def _kernel() -> ModuleType | None:
    try:
        from ..kernels import triton_chunk_hopper
    except (ImportError, AttributeError) as error:
        logger.warning("attention of prompts takes half as long again, as this Triton lacks its language: %s", error)
        return None
    return triton_chunk_hopper
