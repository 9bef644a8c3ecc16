"""Numbers of a model that follow from its config in one way or another, depending on its family."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .families import FAMILIES
from .latent import LatentSpec, score_multiplier
from .ropes import head_dim

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def num_kv_heads(config: PretrainedConfig) -> int:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    count: int = getattr(config, FAMILIES[config.model_type].kv_heads, config.num_attention_heads)
    return count


def expert_size(config: PretrainedConfig) -> int:
    """The intermediate size of an expert."""
    name = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"
    size: int = getattr(config, name)
    return size


def shared_size(config: PretrainedConfig) -> int:
    """The intermediate size of the shared expert; 0: there is none."""
    family = FAMILIES[config.model_type]
    if family.num_shared_experts:
        return expert_size(config) * (getattr(config, family.num_shared_experts) or 0)
    size: int = getattr(config, family.shared_size) if family.shared_size else 0
    return size


def attention_multiplier(config: PretrainedConfig, latent: LatentSpec | None) -> float:
    if latent is not None:
        return score_multiplier(config, latent)
    by_size = getattr(config, "query_pre_attn_scalar", head_dim(config)) ** -0.5
    return FAMILIES[config.model_type].attention_multiplier or float(getattr(config, "attention_multiplier", by_size))


def residual_multiplier(config: PretrainedConfig) -> float:
    if FAMILIES[config.model_type].scales_by_depth:
        return float(config.scale_depth / math.sqrt(config.num_hidden_layers))
    return float(getattr(config, "residual_multiplier", 1.0))


def query_growth(config: PretrainedConfig) -> tuple[float, int]:
    """Return the factor, and the span of positions over which queries are scaled alike.

    Source: Llama 4 blog post, Meta 2025, "inference time temperature".
    """
    if not FAMILIES[config.model_type].grows_queries:
        return 0.0, 1
    return config.rope_parameters["llama_4_scaling_beta"], config.rope_parameters["original_max_position_embeddings"]
