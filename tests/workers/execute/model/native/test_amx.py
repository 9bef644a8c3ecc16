"""The compiled decoder with the products of AMX, in the few tokens for which there is time to emulate it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workers.execute.kernels import amx
from tests.workers.execute.model.native.decoders import (
    FEW_PAGES,
    make_checkpoint,
    make_inputs,
    make_small_decoder,
    run_chunks,
)
from tests.workers.execute.model.native.families import FAMILIES
from tests.workers.execute.model.native.logits import exact_logits, random_tokens
from triptych.workers.execute.kernels.structures import Format

pytestmark = pytest.mark.skipif(not amx.IS_EMULATED, reason="this processor has AMX, or lacks even AVX-512")

TOLERANCE = 0.03  # of the greatest logit
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "a window": ("mistral", {"sliding_window": 20, "hidden_size": 100, "intermediate_size": 70}),
    "experts": ("qwen3_moe", FAMILIES["qwen3_moe"] | {"hidden_size": 100, "moe_intermediate_size": 70}),
    "latents": ("minicpm3", FAMILIES["minicpm3"] | {"hidden_size": 100, "qk_nope_head_dim": 48}),
}
TOKENS = random_tokens(50)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers_and_have_the_same_bits_in_any_chunks_and_batches(shape: str, tmp_path: Path) -> None:
    family, sizes = SHAPES[shape]
    checkpoint = make_checkpoint(family, tmp_path, **{"initializer_range": 0.1, **sizes})
    exact = exact_logits(checkpoint, TOKENS)
    decoder = make_small_decoder(checkpoint, amx.LEVEL, Format.BFLOAT16)
    alone = run_chunks(decoder, TOKENS, [50])
    differences = np.abs(alone - exact).max(axis=1)  # for single tokens, rounding decides between experts
    assert np.median(differences) < TOLERANCE * np.abs(exact).max()
    for chunks in ([1, 1, 17, 31], [33, 16, 1]):
        assert np.array_equal(run_chunks(decoder, TOKENS, chunks), alone), chunks
    mates = [(np.roll(TOKENS, shift), 0, 9 + shift) for shift in (1, 2)]
    assert np.array_equal(decoder.run(make_inputs([(TOKENS, 0, 50), *mates], num_pages=FEW_PAGES)).logits[:50], alone)
    single = make_small_decoder(checkpoint, amx.LEVEL, Format.BFLOAT16, num_threads=1)
    assert np.array_equal(run_chunks(single, TOKENS, [50]), alone)
