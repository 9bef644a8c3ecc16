"""Further supported and refused families: a tiny random model of each in the load-time self-test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from tests.tiny import GPT_LIKE, LLAMA_LIKE, VOCAB_SIZE, build_tiny_model
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.attention.cpu import CpuAttention
from triptych.workers.execute.model.checkpoint.find import check_layer_types
from triptych.workers.execute.model.modules.self_test import switch_to_pages

_NO_HEAD_DIM = {name: value for name, value in LLAMA_LIKE.items() if name != "head_dim"}
_SLIDING = {**LLAMA_LIKE, "sliding_window": 6}
_EXPERTS = {
    **LLAMA_LIKE,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {  # keys and values from a latent vector, with different sizes
    **_EXPERTS,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 64,
    "init_std": 0.2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def _each(families: str, overrides: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(families.split(), overrides)


ACCEPTED: dict[str, dict[str, Any]] = {
    **_each("qwen2 gemma olmo granite cohere starcoder2 smollm3 ernie4_5 helium seed_oss", LLAMA_LIKE),
    **_each("arcee apertus nemotron hunyuan_v1_dense glm glm4 bitnet", LLAMA_LIKE),
    **_each("phi persimmon stablelm gpt_neox", _NO_HEAD_DIM),
    **_each("olmo3 cohere2 exaone4 gemma4_text", _SLIDING),
    **_each("qwen3_moe mixtral granitemoe olmoe phimoe gpt_oss dots1 glm4_moe ernie4_5_moe", _EXPERTS),
    **_each("sarvam_moe solar_open hunyuan_v1_moe hy_v3", _EXPERTS),
    **_each("afmoe cohere2_moe exaone_moe mimo_v2_flash", {**_EXPERTS, "sliding_window": 6}),
    **_each("deepseek_v2 deepseek_v3", _LATENT),
    "gpt_bigcode": GPT_LIKE,
    "opt": _OPT,
    "lfm2": {**LLAMA_LIKE, "layer_types": ["full_attention"] * 3},
    "llama llama3-rope": {"rope_parameters": _LLAMA3_ROPE},
    "llama yarn-rope": {"rope_parameters": _YARN},
}
REFUSED: dict[str, dict[str, Any]] = {
    "mpt": {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 3, "n_heads": 4},
    "rwkv": {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3},
    "diffllama": LLAMA_LIKE,
    "dory": {**_SLIDING, "n_input_layers": 1, "n_output_layers": 1},  # the layer between them runs twice
}


def _known(names: Iterable[str]) -> list[str]:
    """Those of families that this transformers has: some are newer."""
    return [name for name in names if name.split()[0] in CONFIG_MAPPING]


@pytest.mark.parametrize("name", _known(ACCEPTED))
def test_family_runs_on_pages(name: str) -> None:
    model = build_tiny_model(name.split()[0], **ACCEPTED[name])
    check_layer_types(model.config)
    assert len(switch_to_pages(model, CpuAttention(), max_model_len=512).pages) == model.config.num_hidden_layers


@pytest.mark.parametrize("name", _known(REFUSED))
def test_wrong_family_is_refused_even_without_hints_in_its_config(name: str) -> None:
    with pytest.raises(ConfigError, match=f"model family '{name}'"):
        switch_to_pages(build_tiny_model(name, **REFUSED[name]), CpuAttention(), max_model_len=512)


@pytest.mark.parametrize("name", _known(["deepseek_v32", "deepseek_v4", "glm_moe_dsa"]))
def test_attention_that_chooses_its_tokens_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"model family '{name}' has layers of type .*, which cannot run on a paged"):
        check_layer_types(AutoConfig.for_model(name))
