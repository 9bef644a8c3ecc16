"""The KV pool: the number of pages, and the tensors that hold them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from ....protocol.config import CacheConfig
from ....protocol.errors import ConfigError
from ..attention.interface import LayerCache
from ..kernels.sizes import num_scales

logger = logging.getLogger(__name__)

EIGHT_BIT_PAGES = ", int8 keys and values"  # after the name of a backend
SCALE_DTYPE = torch.bfloat16
_GiB = 1 << 30
_CPU_ADVICE = "lower max_model_len or raise num_pages, kv_memory_fraction or max_kv_bytes"
_GPU_ADVICE = "lower max_model_len, or max_num_seqs and prefill_chunk, or raise num_pages or kv_memory_fraction"
_BYTES_WITHOUT_PAGES = 1024  # per token if no layer attends: its entries in tables and queues take memory too


class LayerShape(NamedTuple):
    """One layer's keys and values; int8 have scales. Layers of one model may differ."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        channels = self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize
        return channels + self.num_kv_heads * self.num_scales * SCALE_DTYPE.itemsize

    @property
    def num_scales(self) -> int:
        """Of a token and head."""
        return num_scales(self.key_dim) if self.dtype == torch.int8 else 0


class PoolSize(NamedTuple):
    """The size of the KV pool, and the context that it allows."""

    num_pages: int  # without the trash page
    max_model_len: int  # tokens; as requested, or less if the pool is too small


def size_pages(
    cache: CacheConfig,
    *,
    bytes_per_token: int,
    available_bytes: int,
    on_cpu: bool,
    max_live: int,
    max_model_len: int,
    may_shrink: bool,
) -> PoolSize:
    """Choose the number of pages, by memory unless configured, but no more than ``max_live`` longest sequences need.

    A sequence of ``max_model_len`` tokens must fit; with ``may_shrink`` the length is reduced until it does.

    Raises:
        ConfigError: no page fits, or the longest sequence does not fit and may not be shortened.
    """
    num_needed = -(-max_model_len // cache.page_tokens)
    num_pages = cache.num_pages
    if num_pages is None:
        budget_bytes = int(cache.memory_fraction * available_bytes)
        if on_cpu:
            budget_bytes = min(budget_bytes, cache.max_kv_bytes)
        page_bytes = (bytes_per_token or _BYTES_WITHOUT_PAGES) * cache.page_tokens
        num_affordable = budget_bytes // page_bytes - 1  # one is the trash page
        num_pages = min(num_affordable, max_live * num_needed)
    if num_pages >= num_needed:
        return PoolSize(num_pages, max_model_len)
    room = (
        f"{max(num_pages, 0)} pages of {cache.page_tokens} tokens, {bytes_per_token} bytes a token, "
        f"{available_bytes / _GiB:.2f} GiB free"
    )
    if num_pages < 1 or not may_shrink:
        raise ConfigError(
            f"the KV cache cannot hold one sequence of {max_model_len} tokens: it has {room}; "
            f"{_CPU_ADVICE if on_cpu else _GPU_ADVICE}",
            param="max_model_len",
        )
    logger.warning("max_model_len is reduced from %d to %d: %s", max_model_len, num_pages * cache.page_tokens, room)
    return PoolSize(num_pages, num_pages * cache.page_tokens)


def bytes_per_token(shapes: Iterable[LayerShape]) -> int:
    return sum(shape.bytes_per_token for shape in shapes)


def allocate_pool(
    shapes: Mapping[int, LayerShape], num_pages: int, *, page_size: int, device: torch.device
) -> dict[int, LayerCache]:
    """Allocate zeroed pages for every layer, the trash page first.

    Raises:
        ConfigError: the device does not have enough memory.
    """

    def pages(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_pages + 1, *sizes, dtype=dtype, device=device)

    def cache(shape: LayerShape) -> LayerCache:
        heads, dtype, scales = shape.num_kv_heads, shape.dtype, None
        if shape.num_scales:
            scales = pages(heads, shape.num_scales, page_size, dtype=SCALE_DTYPE)
        keys, values = (pages(page_size, heads, dim, dtype=dtype) for dim in (shape.key_dim, shape.value_dim))
        return LayerCache(keys, values, scales)

    try:
        return {layer: cache(shape) for layer, shape in shapes.items()}
    except RuntimeError as error:  # torch.OutOfMemoryError, and what the CPU allocator raises
        size = (num_pages + 1) * page_size * bytes_per_token(shapes.values())
        raise ConfigError(
            f"{num_pages} pages take {size / _GiB:.2f} GiB, more than {device} has", param="num_pages"
        ) from error
