"""What is known of an architecture of GGUF files that transformers' own reader does not know, or not completely."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .steps import by_experts, by_rows

if TYPE_CHECKING:
    from .file import GgufFile

Attributes = dict[str, Any]  # of a config
Step = Callable[[torch.Tensor, Any], torch.Tensor]  # (a weight as the file has it, the config) -> as the model has it


class Named(NamedTuple):
    """Weights that the package gguf has no name for, or whose tensors are not one for one."""

    weights: str  # a pattern
    tensors: tuple[str, ...]  # without "blk.N." in front, if the weight is one of a layer
    join: Callable[[list[torch.Tensor]], torch.Tensor] = by_experts  # if there are several


# Settings that all architectures have, and the attributes that most families have for them.
COMMON: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Settings that several architectures share.
EXPERTS: Mapping[str, str] = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
ROUTED_EXPERTS: Mapping[str, str] = {  # as DeepSeek names them
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
GRANITE_MULTIPLIERS: Mapping[str, str] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
# If several rules match a weight, the first one whose tensors are in the file applies.
NAMES = (
    Named(r"\.experts\.gate_up_proj$", ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
    Named(r"\.experts\.gate_up_proj$", ("ffn_gate_up_exps.weight",)),  # an option of the converter
    Named(r"\.experts\.up_proj$", ("ffn_up_exps.weight",)),
    Named(r"\.experts\.down_proj$", ("ffn_down_exps.weight",)),
    Named(r"\.(e_score_correction_bias|expert_bias)$", ("exp_probs_b.bias",)),
    Named(r"\.dt_bias$", ("ssm_dt.bias",)),
)
OF_GRANITE = (
    Named(r"\.block_sparse_moe\.router\.weight$", ("ffn_gate_inp.weight",)),
    Named(r"\.shared_mlp\.input_linear\.weight$", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), by_rows),
    Named(r"\.shared_mlp\.output_linear\.weight$", ("ffn_down_shexp.weight",)),
)


@dataclass(frozen=True)
class Architecture:
    """How the settings of a file become a config of one of transformers' families, and its tensors weights."""

    # Settings, without the architecture's prefix, and their attributes in the config; added to ``COMMON`` or replacing
    # some of it.
    settings: Mapping[str, str] = field(default_factory=dict)
    needed: frozenset[str] = frozenset()  # settings without which the model would be another
    # Attributes, and the name of a tensor each: the attribute is true if some layer has such a tensor.
    flags: Mapping[str, str] = field(default_factory=dict)
    # Attributes of all models of the family that no setting states and that differ from transformers' defaults.
    fixed: Attributes = field(default_factory=dict)
    complete: Callable[[GgufFile, Attributes], None] | None = None  # adds attributes that need more than one setting
    reads: frozenset[str] = frozenset()  # settings that ``complete`` reads or checks
    turns: bool = True  # whether queries and keys are rotated by their positions
    turns_in_part: bool = False  # whether the file may state fewer rotated channels than a head has
    names: tuple[Named, ...] = ()  # looked up before NAMES
    # For weights that are a single number: how their names end, and the full name of the setting, a number per layer.
    numbers: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[tuple[str, Step], ...] = ()  # patterns of weights, and what undoes the converter's change

    def attributes(self) -> Mapping[str, str]:
        return {**COMMON, **self.settings}
