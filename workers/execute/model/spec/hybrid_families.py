"""Families with state spaces (Mamba-2), in place of attention or beside it: their facts, as in ``families.py``."""

from __future__ import annotations

from .family import Family, Modules
from .state_space import Settings

_GRANITE_4 = Modules(
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.experts",
    shared="",
)
_HYBRID = Modules(
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    mlp_norm="pre_ff_layernorm",
    final_norm="model.final_layernorm",
)

HYBRIDS: dict[str, Family] = {
    "bamba": Family(modules=_HYBRID, turns_in_part=True, state_spaces=Settings()),
    "falcon_h1": Family(
        modules=_HYBRID,
        logits_setting="lm_head_multiplier",
        multiplies_logits=True,
        has_multipliers=True,
        state_spaces=Settings(
            has_output_bias="projectors_bias",
            has_norm="mamba_rms_norm",
            norms_first="mamba_norm_before_gate",
            input_multiplier="ssm_in_multiplier",
            multipliers="ssm_multipliers",
        ),
    ),
    "granitemoehybrid": Family(
        modules=_GRANITE_4,
        mlp_size="shared_intermediate_size",
        may_lack_positions=True,
        has_experts=True,
        num_experts="num_local_experts",
        shared_size="shared_intermediate_size",
        state_spaces=Settings(),
    ),
    "nemotron_h": Family(
        modules=Modules(
            embedding="model.embeddings",
            final_norm="model.norm_f",
            qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            output="mixer.o_proj",
            gate_up=("mixer.up_proj",),
            down="mixer.down_proj",
            attention_norm="norm",
            mlp_norm="norm",
            router="mixer.gate",
            router_biases="mixer.gate.e_score_correction_bias",
            experts="mixer.experts",
            shared="mixer.shared_experts",
            state_space="mixer",
        ),
        activation="mlp_hidden_act",
        norm_eps="layer_norm_epsilon",
        has_gates=False,
        separates_mlps=True,
        has_experts=True,
        num_experts="n_routed_experts",
        shared_size="moe_shared_expert_intermediate_size",
        has_sigmoid_routers=True,
        may_norm_expert_weights=True,
        has_positions=False,
        renamed=((r"^backbone\.", "model."),),
        state_spaces=Settings(
            num_heads="mamba_num_heads",
            head_dim="mamba_head_dim",
            num_groups="n_groups",
            state_size="ssm_state_size",
            conv_size="conv_kernel",
            has_convolution_bias="use_conv_bias",
            has_bias="use_bias",
            has_output_bias="use_bias",
        ),
    ),
}
