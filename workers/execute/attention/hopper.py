"""Attention of prompts on Hopper by a kernel of its own, where there is one. Axes are those of ``interface``."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import torch

from ..kernels.sizes import cdiv
from ..kernels.support import is_hopper
from .device_step import DeviceStep
from .interface import AttentionForm, LayerCache

logger = logging.getLogger(__name__)

_WHAT = "attention of prompts takes up to 1.3 times as long, as its kernel for Hopper"
_MIN_TILES_PER_PROCESSOR = 1.5  # two programs fit on each
_PROVEN_TOKENS, _KEYS_BEFORE = 200, 99
_TOLERANCE = 0.05  # of outputs that are at most 4, rounded to three digits


class HopperChunks:
    """Does what ``triton_chunk`` would do, faster and with other rounding, for plain prompts that occupy all
    multiprocessors. At the first use with the shapes of a model it is compared with ``triton_chunk``.
    """

    def __init__(self, device: torch.device, num_processors: int) -> None:
        self._num_processors = num_processors
        self._kernel = _kernel() if is_hopper(device) else None
        self._proven: set[tuple[Any, ...]] = set()

    def attend(
        self, cache: LayerCache, query: torch.Tensor, output: torch.Tensor, form: AttentionForm, step: DeviceStep
    ) -> bool:
        """Write the outputs of the last tokens of the step, queries [n, H, D], and say whether this was done.

        It depends on nothing that differs when a graph is replayed.
        """
        kernel = self._kernel
        if kernel is None or not self._suits(kernel, cache, query, form):
            return False
        num_decodes = len(step.token_ids) - len(query)
        try:
            if not self._is_proven(kernel, cache, query):
                return False
            kernel.hopper_attention(
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
            self._kernel = None
            logger.warning("%s failed: %s: %s", _WHAT, type(error).__name__, str(error)[:300])
            return False
        return True

    def _suits(self, kernel: ModuleType, cache: LayerCache, query: torch.Tensor, form: AttentionForm) -> bool:
        if form.sliding_window is not None or form.softcap is not None or form.sinks is not None:
            return False
        if cache.scales is not None or not kernel.suits_hopper(query, cache.keys, cache.values):
            return False
        (num_tokens, num_heads, _), num_kv_heads = query.shape, cache.keys.shape[2]
        num_tiles = cdiv(num_tokens * num_heads // num_kv_heads, kernel.NUM_ROWS) * num_kv_heads
        return num_tiles >= _MIN_TILES_PER_PROCESSOR * self._num_processors

    def _is_proven(self, kernel: ModuleType, cache: LayerCache, query: torch.Tensor) -> bool:
        """Whether the kernel has been compared in these shapes. During a capture nothing can be compared, but each step
        runs once without a graph before that.

        Raises:
            ArithmeticError: the kernels differ.
        """
        shape = (query.dtype, query.shape[1:], cache.keys.shape[1:])
        if shape in self._proven:
            return True
        if query.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        difference = _difference(kernel, cache, query)
        if not difference <= _TOLERANCE:  # or it is no number
            raise ArithmeticError(f"its outputs differ by {difference:.3g}, the limit is {_TOLERANCE}")
        self._proven.add(shape)
        return True


def _kernel() -> ModuleType | None:
    try:
        from ..kernels import triton_chunk_hopper
    except (ImportError, AttributeError) as error:
        logger.warning("%s needs another Triton: %s", _WHAT, error)
        return None
    return triton_chunk_hopper


def _difference(kernel: ModuleType, cache: LayerCache, query: torch.Tensor) -> float:
    """The greatest difference between outputs of the two kernels, for the same random queries and pages in the shapes
    of the model, over all tiles.
    """
    from ..kernels.triton_chunk import chunk_attention  # triton is not available for every device

    device, page_size = query.device, cache.keys.shape[1]
    random = torch.Generator(device=device).manual_seed(0)
    context = _KEYS_BEFORE + _PROVEN_TOKENS
    num_pages = cdiv(context, page_size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device).to(query.dtype)

    keys, values = (normal(num_pages, *cache.keys.shape[1:]) for _ in range(2))
    queries = normal(_PROVEN_TOKENS, *query.shape[1:])
    ints = torch.tensor([context, 0, _PROVEN_TOKENS, *reversed(range(num_pages))], dtype=torch.int32, device=device)
    lengths: dict[str, Any] = {"context_lens": ints[:1], "query_starts": ints[1:3], "block_tables": ints[None, 3:]}
    found, expected = queries.new_full((2, *queries.shape), torch.nan), torch.empty_like(queries)
    scale = query.shape[2] ** -0.5
    for output, tile in zip(found, (kernel.LARGE, kernel.SMALL), strict=True):
        kernel.hopper_attention(queries, keys, values, output, scale=scale, num_processors=2, tile=tile, **lengths)
    chunk_attention(queries, keys, values, expected, scale=scale, window=None, softcap=None, sinks=None, **lengths)
    return float((found.float() - expected.float()).abs().max())
