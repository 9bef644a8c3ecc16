"""The compiled decoder with the products of AMX, in the few tokens for which there is time to emulate it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.execute.kernels import amx
from tests.workers.execute.model.native import EVERY_STEP, PLAINLY, make_checkpoint, make_decoder, make_inputs
from tests.workers.execute.model.native_families import FAMILIES
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.native_decoder import NativeDecoder

pytestmark = pytest.mark.skipif(not amx.IS_EMULATED, reason="this processor has AMX, or lacks even AVX-512")

NUM_PAGES, TOLERANCE = 12, 0.03  # of the greatest logit
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "a window": ("mistral", {"sliding_window": 20, "hidden_size": 100, "intermediate_size": 70}),
    "experts": ("qwen3_moe", FAMILIES["qwen3_moe"] | {"hidden_size": 100, "moe_intermediate_size": 70}),
    "latents": ("minicpm3", FAMILIES["minicpm3"] | {"hidden_size": 100, "qk_nope_head_dim": 48}),
}
TOKENS = np.random.default_rng(0).integers(8, 77, 50, dtype=np.int32)


def run_chunks(decoder: NativeDecoder, sizes: list[int]) -> npt.NDArray[np.float32]:
    """Logits [tokens, V] of one sequence in chunks."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(decoder.run(make_inputs([(TOKENS, start, size)], num_pages=NUM_PAGES)).logits.copy())
        start += size
    return np.concatenate(pieces)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers_and_have_the_same_bits_in_any_chunks_and_batches(shape: str, tmp_path: Path) -> None:
    family, sizes = SHAPES[shape]
    checkpoint = make_checkpoint(family, tmp_path, **{"initializer_range": 0.1, **sizes})
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, **PLAINLY)
    with torch.inference_mode():
        exact = model(torch.from_numpy(TOKENS)[None].long(), use_cache=False).logits[0].numpy()
    options = {"num_pages": NUM_PAGES, "thresholds": EVERY_STEP}
    decoder = make_decoder(checkpoint, amx.LEVEL, Format.BFLOAT16, num_threads=2, **options)
    alone = run_chunks(decoder, [50])
    differences = np.abs(alone - exact).max(axis=1)  # for single tokens, rounding decides between experts
    assert np.median(differences) < TOLERANCE * np.abs(exact).max()
    for chunks in ([1, 1, 17, 31], [33, 16, 1]):
        assert np.array_equal(run_chunks(decoder, chunks), alone), chunks
    mates = [(np.roll(TOKENS, shift), 0, 9 + shift) for shift in (1, 2)]
    assert np.array_equal(decoder.run(make_inputs([(TOKENS, 0, 50), *mates], num_pages=NUM_PAGES)).logits[:50], alone)
    single = make_decoder(checkpoint, amx.LEVEL, Format.BFLOAT16, num_threads=1, **options)
    assert np.array_equal(run_chunks(single, [50]), alone)
