"""What a family of models has in common, as facts."""

from __future__ import annotations

from dataclasses import dataclass

from .state_space import Settings as StateSpaceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """The names of modules in checkpoints: of the model, and of each of its layers."""

    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""  # "": the family has none
    positions: str = ""  # the table of learned positions; "": likewise
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    # Also of a layer with a short convolution, whose input gates, output gates and inputs are one tensor.
    convolution: str = "conv.conv"
    convolution_inputs: str = "conv.in_proj"
    convolution_output: str = "conv.out_proj"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one with the rows of all
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one with the rows of both
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"  # "": attention reads x without a norm
    mlp_norm: str = "post_attention_layernorm"
    attended_norm: str = ""  # of what attention adds to x, in families that may have one
    gated_norm: str = ""  # of what the MLP adds
    activation: str = "mlp.act_fn"  # if it has parameters
    router: str = "mlp.gate"
    router_biases: str = "mlp.gate.e_score_correction_bias"  # a tensor
    experts: str = "mlp.experts"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # inside of each expert
    shared: str = "mlp.shared_expert"  # "": it is called like the MLP of a layer without experts
    shared_gate: str = "mlp.shared_expert_gate"
    state_space: str = "mamba"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family; the defaults describe Llama."""

    modules: Modules = Modules()
    activation: str = "hidden_act"  # the name of the setting, or of the activation if there is none
    mlp_size: str = "intermediate_size"  # the name of the setting; "": it is that of the tensors
    kv_heads: str = "num_key_value_heads"  # likewise; "": as many as there are for queries
    layer_types: str = "layer_types"  # likewise
    window: str = "sliding_window"  # likewise
    norm_eps: str = "rms_norm_eps"  # likewise; "": it is that of torch
    has_layer_norms: bool = False
    has_gates: bool = True  # in MLPs
    norm_offset: float = 0.0  # what stored norm weights are offsets from
    embedding_setting: str = "embedding_multiplier"  # the name of the setting
    scales_by_depth: bool = False  # what is added to x, by a setting divided by the square root of the number of layers
    scales_embedding: bool = False  # by the square root of the hidden size, rounded to the dtype of the model
    is_parallel: bool = False  # attention and MLP read the same x
    parallel: str = ""  # or the name of the setting
    logits_setting: str = "logits_scaling"  # the name of the setting: what logits are divided by
    multiplies_logits: bool = False  # it is a factor instead
    has_multipliers: bool = False  # see multipliers.py
    separates_mlps: bool = False  # a layer has an MLP or experts, or attention or a state space, as its type says
    has_experts: bool = False
    num_experts: str = "num_experts"  # the name of the setting
    # Likewise: only every so many layers have experts, from the first to the last of them; "": no setting says so.
    expert_step: str = "decoder_sparse_step"
    first_experts: str = ""
    last_experts: str = ""
    lists_expert_layers: bool = False  # as "sparse" in mlp_layer_types instead
    shared_size: str = ""  # the name of the setting, in families that have a shared expert with a size of its own
    gates_shared_expert: bool = False  # by a sigmoid; otherwise its weight is 1
    num_shared_experts: str = ""  # the name of the setting, in families that have some: they are one
    has_sigmoid_routers: bool = False
    scales_experts: bool = False  # their weights, by a setting, as do all families with sigmoid routers
    # How many of the highest scores of a group of experts are added up to choose some groups first, in configs that
    # have groups; 0: this is unknown.
    num_group_tops: int = 0
    groups_setting: str = ""  # the name of the setting that says whether groups matter
    router_biases_axes: tuple[int, ...] = ()  # before that of the experts
    may_norm_expert_weights: bool = False  # as the config says; otherwise they are always normed
    slides_everywhere: bool = False  # all layers have a window if the config has one, and names no types of layers
    has_positions: bool = True
    may_lack_positions: bool = False  # as the config says
    turns_where_it_slides: bool = False  # if some layers have a window, only those have positions
    has_slopes: bool = False  # scores fall with the distance, by slopes of the heads; no layer has rotary positions
    first_position: int = 0  # the row of the first one in the table of learned positions
    norms_whole_queries: bool = False  # across all heads together, and likewise keys
    norms_heads: bool = False  # also if these norms have no weights
    norms_turned_heads: bool = False  # queries and keys are normed after they are rotated, not before
    grows_queries: bool = False  # with their position
    gates_outputs: bool = False  # of attention
    turns_in_part: bool = False  # positions may rotate only the first channels of each head
    rotary_channels: str = ""  # of each head, the name of the setting, in families without rotary parameters
    turns_neighbours: bool = False  # positions rotate channel 2i with 2i + 1, not i with i + half of them
    turns_back: bool = False  # positions rotate the other way round
    has_ntk_alpha: bool = False  # "dynamic" positions have a fixed base if the config has an alpha
    attention_multiplier: float = 0.0  # of scores; 0: as the config says
    has_sinks: bool = False  # in each head
    has_limits: bool = False  # on gates and ups
    # Settings that transformers keeps if any config has them, but uses in these families only.
    caps_scores: bool = False
    caps_logits: bool = False
    are_heads_together: bool = False  # in a merged qkv: queries, keys and values of one head, then those of the next
    is_transposed: bool = False  # matrices of layers are stored as [inputs, outputs]
    # Patterns in the names of published tensors, and what replaces them: here, in those of a model without its head.
    renamed: tuple[tuple[str, str], ...] = ((r"^(?=(embed_tokens|layers|norm)\.)", "model."),)
    ignored: str = r"mtp\."  # how the names of tensors without effect begin, such as those for multi-token prediction
    has_latents: bool = False  # in place of keys and values, see spec/latent.py
    has_prediction_layer: bool = False  # or those of one more layer are for it
    has_short_convolutions: bool = False  # in some layers, in place of attention
    has_delta_rules: bool = False  # in some layers, see spec/delta.py
    state_spaces: StateSpaceSettings | None = None  # in some layers, see spec/state_space.py
    delta_is_by_heads: bool = False  # their matrices are ordered by key head: all rows of one head, then the next

    @property
    def may_turn(self) -> bool:
        """Whether positions are rotary, in some layers at least."""
        return self.has_positions and not self.modules.positions and not self.has_slopes
