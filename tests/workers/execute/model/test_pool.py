from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.protocol.config import CacheConfig
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.model.memory import _available_on_machine, available_bytes
from triptych.workers.execute.model.pool import LayerShape, PoolSize, allocate_pool, bytes_per_token, size_pages

MiB = 1 << 20


def size(cache: CacheConfig, **options: Any) -> PoolSize:
    """The size for 1 KiB per token, 1 GiB free and four live sequences of 1024 tokens, by default."""
    defaults = {
        "bytes_per_token": 1024,
        "available_bytes": 1024 * MiB,
        "on_cpu": True,
        "max_live": 4,
        "max_model_len": 1024,
        "may_shrink": False,
    }
    return size_pages(cache, **{**defaults, **options})


def test_pool_is_no_larger_than_the_live_sequences_need() -> None:
    assert size(CacheConfig(page_size=16)) == PoolSize(num_pages=4 * 64, max_model_len=1024)


def test_memory_bounds_the_pool_and_counts_the_trash_page() -> None:
    cache = CacheConfig(page_size=16, kv_memory_fraction=0.5)
    assert size(cache, available_bytes=4 * MiB).num_pages == 2 * 1024 // 16 - 1


def test_cpu_pool_is_bounded_in_bytes() -> None:
    cache = CacheConfig(page_size=16, max_kv_bytes=2 * MiB)
    assert size(cache).num_pages == 2 * 1024 // 16 - 1
    assert size(cache, on_cpu=False).num_pages == 4 * 64


def test_configured_number_of_pages_is_used() -> None:
    assert size(CacheConfig(page_size=16, num_pages=1000)).num_pages == 1000


def test_longest_sequence_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match="one sequence of 1024 tokens: it has 10 pages of 16 tokens"):
        size(CacheConfig(page_size=16, num_pages=10))


def test_steps_of_a_gpu_may_leave_too_little_memory_for_pages() -> None:
    with pytest.raises(ConfigError, match="lower max_model_len, or max_num_seqs and prefill_chunk"):
        size(CacheConfig(), available_bytes=1000, on_cpu=False)


def test_default_length_is_reduced_to_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    assert size(CacheConfig(page_size=16, num_pages=10), may_shrink=True) == PoolSize(10, 160)
    assert "reduced from 1024 to 160" in caplog.text


def test_no_memory_for_a_single_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="it has 0 pages"):
        size(CacheConfig(page_size=16), available_bytes=1000, may_shrink=True)


def test_layers_may_differ() -> None:
    shapes = {0: LayerShape(2, 8, 4, torch.float32), 1: LayerShape(1, 16, 16, torch.bfloat16)}
    caches = allocate_pool(shapes, 3, page_size=4, device=torch.device("cpu"))
    assert [tuple(c.keys.shape) for c in caches.values()] == [(4, 4, 2, 8), (4, 4, 1, 16)]
    num_bytes = sum(pool.nbytes for cache in caches.values() for pool in cache.pools)
    assert num_bytes == 4 * 4 * bytes_per_token(shapes.values())


def test_eight_bits_take_half_the_memory_of_bfloat16_and_a_few_scales() -> None:
    shapes = {0: LayerShape(8, 128, 128, torch.int8), 1: LayerShape(2, 40, 24, torch.int8)}
    caches = allocate_pool(shapes, 3, page_size=64, device=torch.device("cpu"))
    assert [tuple(pool.shape) for pool in caches[0].pools] == [(4, 64, 8, 128), (4, 64, 8, 128), (4, 8, 5, 64)]
    num_bytes = sum(pool.nbytes for cache in caches.values() for pool in cache.pools)
    assert num_bytes == 4 * 64 * bytes_per_token(shapes.values())
    assert shapes[0].bytes_per_token / shapes[0]._replace(dtype=torch.bfloat16).bytes_per_token == 266 / 512


def test_pool_beyond_all_memory_is_an_error() -> None:
    with pytest.raises(ConfigError, match="more than cpu has"):
        allocate_pool({0: LayerShape(8, 128, 128, torch.float32)}, 1 << 40, page_size=16, device=torch.device("cpu"))


def test_available_memory_is_what_the_system_reports(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:   5000 kB\n")
    assert _available_on_machine(tmp_path / "meminfo") == 5000 * 1024
    assert available_bytes(torch.device("cpu")) > 0
