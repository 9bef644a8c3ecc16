"""Attention to latents on the compiled kernels: what pages hold, and what the kernels refuse.

That it is right is tested beside the other families, see ``native/families.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters import make_adapter
from tests.workers.execute.model.native.decoders import (
    NUM_PAGES,
    PAGE_SIZE,
    NativeEngine,
    make_checkpoint,
    make_decoder,
)
from triptych.protocol.config import ModelConfig, PipelineConfig
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.build import rehearse


@pytest.mark.parametrize(("has_eight_bits", "num_bytes"), [(False, (2 * 80, 2 * 64)), (True, (80 + 5 * 2, 64 + 2))])
def test_pages_hold_one_latent_for_all_heads(has_eight_bits: bool, num_bytes: tuple[int, int], tmp_path: Path) -> None:
    checkpoint = make_checkpoint("youtu", tmp_path)
    options: dict[str, Any] = {"num_pages": NUM_PAGES, "num_threads": 1, "eight_bit_pages": has_eight_bits}
    decoder = make_decoder(checkpoint, available_levels()[0], Format.BFLOAT16, **options)
    assert [pool.nbytes / (NUM_PAGES + 1) / PAGE_SIZE for pool in decoder.pools] == [*num_bytes] * 3


@pytest.mark.parametrize(
    ("sizes", "is_adapted", "why"),
    [
        ({"kv_lora_rank": 48}, False, "its latents have 48 channels"),
        ({"q_lora_rank": 48}, False, "its latents of queries have 48 channels"),
        ({"v_head_dim": 32}, False, "its values have 32 channels"),
        ({"qk_nope_head_dim": 24}, False, "its plain keys have 24 channels"),
        ({"qk_rope_head_dim": 8, "head_dim": 8}, False, "its heads have 72 channels"),
        ({}, True, "the kernels have no adapters"),
    ],
    ids=["latents", "latents of queries", "values", "plain keys", "turned keys", "adapters"],
)
def test_what_the_kernels_do_not_compute_is_refused(
    sizes: dict[str, int], is_adapted: bool, why: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("youtu", tmp_path / "checkpoint", **sizes)
    adapters = [f"a={make_adapter(tmp_path / 'a', checkpoint, targets=('o_proj',))}"] if is_adapted else []
    with pytest.raises(ConfigError, match=why):
        NativeEngine(checkpoint, tmp_path, lora_modules=tuple(adapters))


def test_adapter_is_refused_once_the_kernels_run_the_model(tmp_path: Path) -> None:
    """At a start with the adapter, transformers' modules run it; but their pages are several times as large."""
    checkpoint = make_checkpoint("youtu", tmp_path / "checkpoint")
    NativeEngine(checkpoint, tmp_path)
    adapter = f"a={make_adapter(tmp_path / 'a', checkpoint, targets=('o_proj',))}"
    config = PipelineConfig(model=ModelConfig(model=str(checkpoint), device="cpu", lora_modules=(adapter,)))
    with pytest.raises(ConfigError, match="no adapters for latent attention; name the adapter when"):
        rehearse(config, folder=checkpoint, run_dir=tmp_path)
