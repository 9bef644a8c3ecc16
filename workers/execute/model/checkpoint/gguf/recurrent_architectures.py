"""The same for architectures with recurrent layers: gated delta rules, state spaces and short convolutions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import steps
from .architecture import EXPERTS, GRANITE_MULTIPLIERS, OF_GRANITE, ROUTED_EXPERTS, Architecture, Attributes, Named
from .completions import add_score_divisor, kinds_of_layers, sigmoid_experts

if TYPE_CHECKING:
    from .file import GgufFile

_EXPERTS = frozenset(EXPERTS)
_SIZES = {  # of state spaces and delta rules
    "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size",
}  # fmt: skip
_STATE_SPACE = ((r"\.A_log$", steps.log_of_negated), (r"\.(mamba|mixer)\.norm\.", steps.flat))
_TURNED = (r"\.[qk]_proj\.", steps.turned_back)


_MIXERS = {  # what Nemotron-H calls what a layer does
    "A_log": "ssm_a",
    "D": "ssm_d",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "in_proj.weight": "ssm_in.weight",
    "in_proj.bias": "ssm_in.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
    "out_proj.bias": "ssm_out.bias",
    "up_proj.weight": "ffn_up.weight",
    "up_proj.bias": "ffn_up.bias",
    "down_proj.weight": "ffn_down.weight",
    "down_proj.bias": "ffn_down.bias",
    "q_proj.weight": "attn_q.weight",
    "k_proj.weight": "attn_k.weight",
    "v_proj.weight": "attn_v.weight",
    "o_proj.weight": "attn_output.weight",
    "gate.weight": "ffn_gate_inp.weight",
    "shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "fc1_latent_proj.weight": "ffn_latent_down.weight",
    "fc2_latent_proj.weight": "ffn_latent_up.weight",
}


def _granite_hybrid(file: GgufFile, values: Attributes) -> None:
    kinds = kinds_of_layers(file, {"ssm_in.weight": "mamba", "attn_q.weight": "attention"})
    turns = file.of_model("rope.scaling.finetuned") is not False
    values.setdefault("num_local_experts", 0)  # without any, all rows go through what is shared otherwise
    shared = file.of_model("expert_shared_feed_forward_length") or file.of_model("feed_forward_length")
    values |= {
        "layer_types": kinds,
        "num_key_value_heads": _key_heads(file),
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if turns else "nope",
        "mamba_d_head": file.of_model("ssm.inner_size") // file.of_model("ssm.time_step_rank"),
        "mamba_expand": file.of_model("ssm.inner_size") // values["hidden_size"],
    }
    add_score_divisor(values)


def _falcon_h1(file: GgufFile, values: Attributes) -> None:
    values["mamba_d_head"] = values["mamba_d_ssm"] // values["mamba_n_heads"]


def _nemotron_h(file: GgufFile, values: Attributes) -> None:
    kinds = {
        "ssm_in.weight": "mamba", "attn_q.weight": "attention", "ffn_gate_inp.weight": "moe", "ffn_up.weight": "mlp",
    }  # fmt: skip
    sizes = [int(tensor.shape[1]) for name, tensor in file.tensors.items() if name.endswith(".ffn_up.weight")]
    values |= {
        "layers_block_type": kinds_of_layers(file, kinds),
        "num_key_value_heads": _key_heads(file),
        "intermediate_size": max(sizes, default=0),  # settings have it for each layer, 0 for those of experts too
        "mamba_head_dim": file.of_model("ssm.inner_size") // file.of_model("ssm.time_step_rank"),
    }
    del values["num_hidden_layers"]  # follows from the kinds


def _qwen3_next(file: GgufFile, values: Attributes) -> None:
    kinds = {"ssm_conv1d.weight": "linear_attention", "attn_q.weight": "full_attention"}
    values["layer_types"] = kinds_of_layers(file, kinds)
    values["linear_value_head_dim"] = file.of_model("ssm.inner_size") // file.of_model("ssm.time_step_rank")


def _lfm2_moe(file: GgufFile, values: Attributes) -> None:
    kinds = {"shortconv.in_proj.weight": "conv", "attn_q.weight": "full_attention"}
    values |= {"layer_types": kinds_of_layers(file, kinds), "num_key_value_heads": _key_heads(file)}
    sigmoid_experts(file, values)


def _key_heads(file: GgufFile) -> int:
    """Of the layers that attend: the others have none."""
    stated = file.of_model("attention.head_count_kv")
    return int(max(stated) if isinstance(stated, list) else stated)


FAMILIES: Mapping[str, Architecture] = {
    "falcon_h1": Architecture(  # whose multipliers are in the weights
        settings={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.group_count": "mamba_n_groups",
            "ssm.inner_size": "mamba_d_ssm",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_n_heads",
        },
        needed=frozenset(_SIZES),
        flags={
            "attention_bias": "attn_q.bias",
            "mamba_conv_bias": "ssm_conv1d.bias",
            "mamba_proj_bias": "ssm_in.bias",
            "mamba_rms_norm": "ssm_norm.weight",
            "mlp_bias": "ffn_up.bias",
        },
        fixed={"mamba_norm_before_gate": False},
        complete=_falcon_h1,
        names=(
            Named(r"\.pre_ff_layernorm\.weight$", ("ffn_norm.weight",)),
            Named(r"\.pre_ff_layernorm\.weight$", ("ffn_norm",)),
        ),
        steps=_STATE_SPACE,
    ),
    "granitemoehybrid": Architecture(
        settings={
            **GRANITE_MULTIPLIERS,
            **EXPERTS,
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.group_count": "mamba_n_groups",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_n_heads",
        },
        needed=frozenset({*_SIZES, "logit_scale"}),
        flags={
            "attention_bias": "attn_q.bias",
            "mamba_conv_bias": "ssm_conv1d.bias",
            "mamba_proj_bias": "ssm_in.bias",
        },
        complete=_granite_hybrid,
        reads=frozenset(
            {
                "attention.head_count_kv",
                "expert_shared_feed_forward_length",
                "rope.scaling.finetuned",
                "ssm.inner_size",
            }
        ),
        names=(
            *OF_GRANITE,
            Named(r"\.shared_mlp\.input_linear\.weight$", ("ffn_gate.weight", "ffn_up.weight"), steps.by_rows),
            Named(r"\.shared_mlp\.output_linear\.weight$", ("ffn_down.weight",)),
        ),
        steps=(*_STATE_SPACE, _TURNED),
    ),
    "lfm2_moe": Architecture(
        settings={
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_used_count": "num_experts_per_tok",
            "leading_dense_block_count": "num_dense_layers",
            "shortconv.l_cache": "conv_L_cache",
        },
        needed=_EXPERTS | {"leading_dense_block_count", "shortconv.l_cache"},
        flags={"conv_bias": "shortconv.in_proj.bias", "use_expert_bias": "exp_probs_b.bias"},
        complete=_lfm2_moe,
        reads=frozenset({"attention.head_count_kv", "expert_gating_func"}),
    ),
    "nemotron_h": Architecture(
        settings={
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            **ROUTED_EXPERTS,
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "moe_latent_size": "moe_latent_size",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.group_count": "n_groups",
            "ssm.state_size": "ssm_state_size",
            "ssm.time_step_rank": "mamba_num_heads",
        },
        needed=frozenset({*_SIZES, "attention.layer_norm_epsilon"}),
        flags={
            "attention_bias": "attn_q.bias",
            "mamba_proj_bias": "ssm_in.bias",
            "mlp_bias": "ffn_up.bias",
            "use_conv_bias": "ssm_conv1d.bias",
        },
        complete=_nemotron_h,
        reads=frozenset(
            {
                "attention.head_count_kv",
                "feed_forward_length",
                "rope.dimension_count",
                "rope.scaling.finetuned",
                "ssm.inner_size",
            }
        ),
        turns=False,
        names=tuple(Named(rf"\.mixer\.{re.escape(ours)}$", (theirs,)) for ours, theirs in _MIXERS.items()),
        steps=(*_STATE_SPACE, _TURNED),
    ),
    "qwen3_next": Architecture(
        settings={
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "expert_used_count": "num_experts_per_tok",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.time_step_rank": "linear_num_value_heads",
        },
        needed=_EXPERTS | _SIZES,
        complete=_qwen3_next,
        reads=frozenset({"full_attention_interval", "ssm.inner_size"}),
        turns_in_part=True,
        names=(Named(r"\.in_proj_qkvz\.weight$", ("attn_qkv.weight", "attn_gate.weight"), steps.by_rows),),
        steps=(
            (r"\.A_log$", steps.log_of_negated),
            (r"\.in_proj_qkvz\.", steps.by_delta_heads),
            (r"(?<!linear_attn\.)norm\.weight$", steps.minus_one),
        ),
    ),
}
