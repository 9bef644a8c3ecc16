"""The compiled decoder at every level of this processor: compared with float64, and bit for bit with itself."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.proc import address_space
from tests.workers.execute.kernels.levels import WHOLE_LEVELS
from tests.workers.execute.model.native.decoders import (
    FEW_PAGES,
    PAGE_SIZE,
    PLAIN_FORMATS,
    changed_tensors,
    in_four_bits,
    levels_and_formats,
    make_checkpoint,
    make_inputs,
    make_small_decoder,
    over_levels,
    run_chunks,
)
from tests.workers.execute.model.native.families import FAMILIES
from tests.workers.execute.model.native.logits import (
    NUM_TOKENS,
    assert_same_bits_in_every_step,
    exact_logits,
    random_tokens,
)
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.structures import Format

Floats = npt.NDArray[np.float32]

NUM_PAGES = FEW_PAGES
NUM_KEYS = (NUM_PAGES + 1) * PAGE_SIZE * 2 * 16  # numbers per layer, with two heads of 16 channels unless given


def _heads(num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}


# Relative to the greatest logit. These weights are exact in four bits, so those in eight have the larger error.
TOLERANCES = {Format.FLOAT32: 2e-5, Format.BFLOAT16: 0.06, Format.INT8: 0.3, Format.INT4: 0.25}
ROPE = {"factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4}
_STRETCHED = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 4.0],
    "long_factor": [8.0] * 6,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "heads of 64": ("llama", {"head_dim": 64, "hidden_size": 100, "vocab_size": 77, "intermediate_size": 70}),
    "heads of 80, one group": ("llama", {"head_dim": 80, "hidden_size": 70} | _heads(7, 1)),
    "heads of 96, no groups": ("qwen2", {"head_dim": 96, "hidden_size": 66} | _heads(3, 3)),
    "heads of 128, window": ("mistral", {"head_dim": 128, "sliding_window": 70, "hidden_size": 132}),
    "heads of 256": ("qwen3", {"head_dim": 256, "intermediate_size": 33, "vocab_size": 300}),
    "heads of 32, biases": ("llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "tied": ("qwen3", {"tie_word_embeddings": True, "vocab_size": 259}),
    "llama3": ("llama", {"rope_parameters": ROPE | _LLAMA3}),
    "yarn": ("qwen3", {"rope_parameters": ROPE | {"rope_type": "yarn"}}),
    "multipliers": ("granite", FAMILIES["granite"] | {"tie_word_embeddings": True}),
    "a name for the MLP that is shared elsewhere": (
        "granitemoehybrid",
        {"layer_types": ["attention"] * 3, "position_embedding_type": "rope", "num_local_experts": 0, "head_dim": 48},
    ),
    "multipliers, biases": (
        "granite",
        {"embedding_multiplier": 0.1, "residual_multiplier": 2.5, "attention_multiplier": 0.03, "logits_scaling": 0.3}
        | {"attention_bias": True, "mlp_bias": True, "head_dim": 80, "hidden_size": 70},
    ),
    "multipliers of 1": ("granite", {"head_dim": 32}),  # and that of scores
    "merged tensors": ("phi3", {"head_dim": 32, "intermediate_size": 70, "hidden_size": 100} | _heads(6, 2)),
    "merged tensors, tied, positions of Phi-4-mini": (
        "phi3",
        {"tie_word_embeddings": True, "intermediate_size": 33, "rope_parameters": _STRETCHED}
        | {"original_max_position_embeddings": 256},
    ),
    "merged tensors, window": ("phi3", {"sliding_window": 70}),
    "norms behind": (
        "olmo2",
        {"hidden_size": 100, "head_dim": 48, "intermediate_size": 70, "initializer_range": 0.05} | _heads(3, 1),
    ),
    "norms behind, head by head": ("exaone4", {"hidden_size": 70, "head_dim": 80} | _heads(4, 2)),
    "no gates": ("arcee", {"intermediate_size": 70, "hidden_size": 100, "mlp_bias": True}),
    "layer norms, no gates": ("starcoder2", {"intermediate_size": 200, "hidden_size": 100, "head_dim": 32}),
    "layer norms around 1": ("nemotron", {"hidden_size": 70, "head_dim": 96, "initializer_range": 0.05}),
    "a bias of the head": ("phi", {"head_dim": 32, "hidden_size": 128, "vocab_size": 77}),
    "parallel layers, window": ("cohere2", FAMILIES["cohere2"] | {"sliding_window": 70}),
    "half of the channels turn": ("glm4", {"head_dim": 96, "hidden_size": 100, "attention_bias": True}),
    "heads are normed once they are turned": (
        "hunyuan_v1_dense",
        {"head_dim": 80, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "learned positions, relu": ("opt", {"hidden_size": 160, "head_dim": 80, "init_std": 0.1} | _heads(2, 2)),
    "heads wider than the hidden state, normed without weights": ("nanochat", {"head_dim": 96, "hidden_size": 66}),
    "norms without weights, clipped": ("olmo", {"hidden_size": 100, "clip_qkv": 0.9}),
    "scores that fall with the distance": ("bloom", {"hidden_size": 192, "vocab_size": 77} | _heads(12, 12)),
    "xielu": ("apertus", {"intermediate_size": 70, "hidden_size": 100}),
    "gemma": ("gemma", {"head_dim": 256, "hidden_size": 100, "initializer_range": 0.04} | _heads(2, 1)),
    "caps": ("gemma2", FAMILIES["gemma2"] | {"sliding_window": 70, "final_logit_softcapping": 9.0, "head_dim": 48}),
    "one cap": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": 9.0, "intermediate_size": 33}),
    "two ropes": (
        "gemma3_text",
        FAMILIES["gemma3_text"] | {"sliding_window": 70, "vocab_size": 300, "hidden_size": 100},
    ),
    "two ropes, one of them longer": (
        "gemma3_text",
        FAMILIES["gemma3_text"]
        | {
            "sliding_window": 70,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "latents": ("minicpm3", FAMILIES["minicpm3"] | {"hidden_size": 100, "v_head_dim": 128, "qk_nope_head_dim": 48}),
    "latents, biases, queries without one": (
        "youtu",
        FAMILIES["youtu"] | {"attention_bias": True, "num_attention_heads": 7, "kv_lora_rank": 128},
    ),
    "no layer turns": ("smollm3", {"no_rope_layers": [0, 0, 0], "head_dim": 32, "tie_word_embeddings": False}),
    "one layer turns": ("smollm3", {"no_rope_layers": [0, 1, 0], "attention_bias": True, "hidden_size": 100}),
    "those turn that do not slide": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1]} | {"sliding_window": 70, "use_sliding_window": True},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers_in_float64(shape: str, tmp_path: Path) -> None:
    family, overrides = SHAPES[shape]
    checkpoint = in_four_bits(make_checkpoint(family, tmp_path, **{"initializer_range": 0.1, **overrides}))
    token_ids = random_tokens()
    exact = exact_logits(checkpoint, token_ids)
    for level, format_ in levels_and_formats(list(SHAPES).index(shape)):
        decoder = make_small_decoder(checkpoint, level, format_)
        difference = np.abs(run_chunks(decoder, token_ids, [100, 1, 40, 9]) - exact).max()
        assert difference < TOLERANCES[format_] * np.abs(exact).max(), f"{level} {format_.name}"


@over_levels("family", ["mistral", "gemma2", "cohere2"])
def test_logits_have_the_same_bits_in_any_chunks_and_batches(
    family: str, level: str, format_: Format, tmp_path: Path
) -> None:
    assert_same_bits_in_every_step(make_checkpoint(family, tmp_path, sliding_window=70), level, format_)


@pytest.mark.parametrize("family", ["llama", "youtu"])
def test_sampled_tokens_have_the_bits_that_they_have_if_all_are_sampled(family: str, tmp_path: Path) -> None:
    """In the last layer, the others do not attend."""
    decoder = make_small_decoder(make_checkpoint(family, tmp_path), available_levels()[0], Format.BFLOAT16)
    ids = random_tokens()
    inputs = make_inputs([(ids, 0, 40), (ids[50:], 0, 1), (ids[60:], 0, 30)], num_pages=FEW_PAGES)
    all_logits = decoder.run(inputs).logits.copy()
    for rows in ([3, 4, 20, 39, 40, 70], [40], [0], [70], []):
        chosen = replace(inputs, sample_rows=np.array(rows, np.int32))
        assert np.array_equal(decoder.run(chosen).logits, all_logits[rows]), rows


@pytest.mark.parametrize("family", ["llama", "youtu"])
def test_content_left_in_a_page_by_an_earlier_sequence_has_no_effect(family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(family, tmp_path)
    decoder, token_ids = (
        make_small_decoder(checkpoint, available_levels()[0], Format.BFLOAT16),
        random_tokens(),
    )
    clean = run_chunks(decoder, token_ids, [33])
    for pool in decoder.pools:
        pool[:] = 0xFF  # NaN
    assert np.array_equal(run_chunks(decoder, token_ids, [20, 1, 12]), clean)


@over_levels("hidden_size", [64, 96, 100])  # whole, and two that are padded
def test_nan_token_is_reported_and_ends_with_its_step(
    level: str, format_: Format, hidden_size: int, tmp_path: Path
) -> None:
    checkpoint, bad = make_checkpoint("llama", tmp_path, hidden_size=hidden_size), (5, 6, 7)
    with changed_tensors(checkpoint) as tensors:
        for token_id, value in zip(bad, (math.inf, -math.inf, math.nan), strict=True):
            tensors["model.embed_tokens.weight"][token_id, 0] = value
    decoder = make_small_decoder(checkpoint, level, format_)
    clean = np.setdiff1d(random_tokens(), bad).astype(np.int32)[:20]
    expected = run_chunks(decoder, clean, [len(clean)])
    for token_id in bad:
        outputs = decoder.run(make_inputs([(np.full(20, token_id, np.int32), 0, 20)], num_pages=NUM_PAGES))
        assert np.isnan(outputs.greatest).all(), f"token {token_id}: {outputs.greatest}"
    assert np.array_equal(run_chunks(decoder, clean, [len(clean)]), expected)


@pytest.mark.parametrize("level", WHOLE_LEVELS)
@pytest.mark.parametrize("format_", PLAIN_FORMATS, ids=lambda f: f.name.lower())
def test_nan_key_is_reported(level: str, format_: Format, tmp_path: Path) -> None:
    decoder, token_ids = make_small_decoder(make_checkpoint("llama", tmp_path), level, format_), random_tokens(9)
    run_chunks(decoder, token_ids, [8])
    element = ctypes.c_uint32 if format_ is Format.FLOAT32 else ctypes.c_uint16
    keys = (element * NUM_KEYS).from_address(decoder._layers[0].keys)
    place = next(place for place, key in enumerate(keys) if key)
    for payload in (0, 1):  # the smallest NaN, and one more bit
        keys[place] = (0x7FC0 << 8 * ctypes.sizeof(element) - 16) + payload
        outputs = decoder.run(make_inputs([(token_ids, 8, 1)], num_pages=NUM_PAGES))
        assert np.isnan(outputs.greatest).all(), outputs.greatest


def test_step_without_enough_memory_is_reported(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path)
    decoder, token_ids = (
        make_small_decoder(checkpoint, available_levels()[0], Format.FLOAT32),
        random_tokens(),
    )
    expected = run_chunks(decoder, token_ids, [NUM_TOKENS])
    with address_space(1 << 30), pytest.raises(MemoryError, match="step of 2147483647 tokens"):
        decoder.reserve(num_tokens=(1 << 31) - 1, num_rows=1)
    assert np.array_equal(run_chunks(decoder, token_ids, [NUM_TOKENS]), expected)


def test_more_threads_than_the_system_allows_are_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path)
    with address_space(256 << 20), pytest.raises(ConfigError, match="cannot start 500 threads"):
        make_small_decoder(checkpoint, available_levels()[0], Format.FLOAT32, num_threads=500)
