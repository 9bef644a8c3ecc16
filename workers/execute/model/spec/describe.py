"""Describes the decoder of a checkpoint by its config and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import config_numbers, layer_kinds
from .checks import ACTIVATIONS, activation_of, check_config, check_sizes, check_tensors
from .decoder import DecoderSpec
from .delta import describe_delta
from .families import FAMILIES
from .latent import describe_latents, latent_modules
from .multipliers import find_multipliers
from .ropes import head_dim, rotary_dim
from .state_space import describe_state_space

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe_decoder(config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
    """Describe a checkpoint with this config and tensors of these shapes.

    Raises:
        Unsupported: it has a feature that ``DecoderSpec`` cannot express.
    """
    check_config(config)
    family = FAMILIES[config.model_type]
    modules = family.modules
    is_recurrent, attends = layer_kinds.recurrent_layers(config), layer_kinds.attending_layers(config)
    has_experts = layer_kinds.has_experts(config)
    # The first attention layer, if there is one: all of them have the same tensors.
    layer = f"{modules.layers}.{attends.index(True) if True in attends else 0}."
    latent = describe_latents(config) if family.has_latents else None
    embedding_multiplier = config.hidden_size**0.5 if family.scales_embedding else 1.0
    logits_scaling = float(getattr(config, family.logits_setting, 1.0))
    query_growth, query_growth_span = config_numbers.query_growth(config)
    groups = layer_kinds.expert_groups(config) if any(has_experts) else layer_kinds.UNGROUPED
    multipliers = find_multipliers(config)
    inner = shapes.get(f"{layer}{modules.down}.weight", (0,))[0 if family.is_transposed else -1]

    def has(module: str, kind: str) -> bool:
        return f"{layer}{module}.{kind}" in shapes

    spec = DecoderSpec(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, family.mlp_size, 0) if family.mlp_size else inner,
        num_heads=config.num_attention_heads,
        num_kv_heads=1 if latent else config_numbers.num_kv_heads(config),
        head_dim=latent.cached_dim if latent else head_dim(config),
        latent=latent,
        num_positions=config.max_position_embeddings if modules.positions else 0,
        rotary_dim=rotary_dim(config),
        turns_neighbours=family.turns_neighbours and bool(getattr(config, "rope_interleave", True)),
        gates_outputs=family.gates_outputs,
        delta=describe_delta(config, is_by_heads=family.delta_is_by_heads)
        if family.has_delta_rules and any(is_recurrent)
        else None,
        num_taps=config.conv_L_cache if family.has_short_convolutions else 0,
        space=describe_state_space(config, family.state_spaces) if family.state_spaces and any(is_recurrent) else None,
        is_recurrent=is_recurrent,
        attends=attends,
        has_mlp=layer_kinds.layers_with_mlp(config),
        activation="clamped_swiglu" if family.has_limits else ACTIVATIONS[activation_of(config)],
        gate_slope=getattr(config, "swiglu_alpha", 1.702) if family.has_limits else multipliers.gates,
        gate_limit=getattr(config, "swiglu_limit", 7.0),
        has_gates=family.has_gates,
        is_parallel=getattr(config, family.parallel, family.is_parallel),
        norm_eps=getattr(config, family.norm_eps, 1e-5),
        has_layer_norms=family.has_layer_norms,
        has_norm_weights=not modules.attention_norm or has(modules.attention_norm, "weight"),
        has_norm_biases=has(modules.attention_norm, "bias"),
        norm_offset=family.norm_offset,
        attention_multiplier=multipliers.scores * config_numbers.attention_multiplier(config, latent),
        qkv_limit=getattr(config, "clip_qkv", None),
        score_cap=config.attn_logit_softcapping if family.caps_scores else None,
        logit_cap=config.final_logit_softcapping if family.caps_logits else None,
        query_growth=query_growth,
        query_growth_span=query_growth_span,
        embedding_multiplier=float(getattr(config, family.embedding_setting, embedding_multiplier)),
        rounds_embedding_multiplier=family.scales_embedding,
        residual_multiplier=config_numbers.residual_multiplier(config),
        multipliers=multipliers,
        logits_scaling=1.0 / logits_scaling if family.multiplies_logits else logits_scaling,
        windows=layer_kinds.windows(config),
        ropes=layer_kinds.rope_numbers(config),
        has_experts=has_experts,
        num_experts=layer_kinds.num_experts(config) if any(has_experts) else 0,
        num_expert_groups=groups.num_groups,
        num_chosen_groups=groups.num_chosen,
        num_group_tops=groups.num_tops,
        experts_per_token=config.num_experts_per_tok if any(has_experts) else 0,
        expert_size=config_numbers.expert_size(config) if any(has_experts) else 0,
        shared_size=config_numbers.shared_size(config) if any(has_experts) else 0,
        gates_shared_expert=family.gates_shared_expert,
        has_sigmoid_routers=family.has_sigmoid_routers,
        has_router_biases=any(name.endswith(modules.router_biases) for name in shapes),
        expert_multiplier=float(getattr(config, "routed_scaling_factor", 1.0))
        if family.has_sigmoid_routers or family.scales_experts
        else 1.0,
        norms_expert_weights=not family.may_norm_expert_weights or bool(config.norm_topk_prob),
        has_qk_norm=latent is None and (family.norms_heads or has(modules.query_norm, "weight")),
        norms_whole_queries=family.norms_whole_queries,
        norms_turned_heads=family.norms_turned_heads,
        has_pre_norms=bool(modules.attention_norm),
        has_post_norms=has(modules.attended_norm, "weight"),
        has_qkv_bias=has((latent_modules(latent) if latent else modules.qkv)[0], "bias"),
        has_output_bias=has(modules.output, "bias"),
        has_mlp_bias=has(modules.down, "bias") or has(modules.router, "bias"),
        has_sinks=family.has_sinks,
        has_head_bias="lm_head.bias" in shapes and not config.tie_word_embeddings,
        is_tied=bool(config.tie_word_embeddings),
    )
    check_sizes(spec)
    check_tensors(spec, shapes)
    return spec
