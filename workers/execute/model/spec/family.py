"""What a family of models has in common, as facts."""

from __future__ import annotations

from dataclasses import dataclass

from .state_space import Settings as StateSpaceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """The names of modules in checkpoints: of the model, and of each of its layers. "": the family has none."""

    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""
    positions: str = ""  # the table of learned positions
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    # The names inside a layer. Tuples are separate tensors, or a single one with the rows of all, in this order.
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"  # if it has parameters
    attention_norm: str = "input_layernorm"  # of the inputs of attention
    mlp_norm: str = "post_attention_layernorm"  # of the inputs of the MLP
    attended_norm: str = ""  # of what attention adds to x
    gated_norm: str = ""  # of what the MLP adds to x
    router: str = "mlp.gate"
    router_biases: str = "mlp.gate.e_score_correction_bias"  # a tensor
    experts: str = "mlp.experts"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # inside each expert
    shared: str = "mlp.shared_expert"  # "": the shared expert is named like the MLP of a layer without experts
    shared_gate: str = "mlp.shared_expert_gate"
    convolution: str = "conv.conv"  # of a layer with a short convolution
    convolution_inputs: str = "conv.in_proj"  # one tensor: input gates, output gates and inputs
    convolution_output: str = "conv.out_proj"
    state_space: str = "mamba"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family; the defaults describe Llama."""

    modules: Modules = Modules()

    # The names of settings in a config. "": there is no such setting, unless stated otherwise.
    activation: str = "hidden_act"  # or of the activation itself, if no setting says it
    mlp_size: str = "intermediate_size"  # "": the size follows from the shapes of tensors
    kv_heads: str = "num_key_value_heads"  # "": as many as heads of queries
    layer_types: str = "layer_types"
    window: str = "sliding_window"
    norm_eps: str = "rms_norm_eps"  # "": torch's default
    embedding_setting: str = "embedding_multiplier"
    logits_setting: str = "logits_scaling"  # logits are divided by it, see ``multiplies_logits``
    parallel: str = ""  # says whether ``is_parallel``
    rotary_channels: str = ""  # of each head, in families without rotary parameters
    num_experts: str = "num_experts"
    expert_step: str = "decoder_sparse_step"  # every so many layers have experts
    first_experts: str = ""  # the first layer that has experts
    last_experts: str = ""  # the last one
    num_shared_experts: str = ""  # these are computed as a single one
    shared_size: str = ""  # of a shared expert whose size does not follow from that of the others
    groups_setting: str = ""  # says whether groups of experts matter

    # Norms, and how parts are put together.
    has_layer_norms: bool = False  # not RMS norms
    norm_offset: float = 0.0  # added to stored norm weights
    is_parallel: bool = False  # attention and MLP read the same x
    separates_mlps: bool = False  # a layer has an MLP or experts, or attention or a state space, as its type says
    scales_embedding: bool = False  # by the square root of the hidden size, rounded to the dtype of the model
    scales_by_depth: bool = False  # what is added to x, by a setting divided by the square root of the number of layers
    multiplies_logits: bool = False  # by ``logits_setting``, instead of dividing by it
    has_multipliers: bool = False  # see multipliers.py

    # MLPs and experts.
    has_gates: bool = True
    has_limits: bool = False  # on gates and ups
    has_experts: bool = False
    lists_expert_layers: bool = False  # as "sparse" in the setting mlp_layer_types
    gates_shared_expert: bool = False  # by a sigmoid; otherwise its weight is 1
    has_sigmoid_routers: bool = False  # not a softmax
    scales_experts: bool = False  # a setting multiplies their weights, as in all families with sigmoid routers
    may_norm_expert_weights: bool = False  # as the config says; otherwise they are always normed
    # If a config has groups of experts: a group is chosen by so many of its highest scores, added up; 0: unknown.
    num_group_tops: int = 0
    router_biases_axes: tuple[int, ...] = ()  # before the axis of the experts

    # Positions and windows.
    has_positions: bool = True
    may_lack_positions: bool = False  # as the config says
    first_position: int = 0  # the row of the first one in the table of learned positions
    slides_everywhere: bool = False  # all layers have a window if the config has one, and names no types of layers
    turns_where_it_slides: bool = False  # if some layers have a window, only those have positions
    turns_in_part: bool = False  # positions may rotate only the first channels of each head
    turns_neighbours: bool = False  # positions rotate channel 2i with 2i + 1, not i with i + half of them
    turns_back: bool = False  # positions rotate the other way round
    has_ntk_alpha: bool = False  # "dynamic" positions have a fixed base if the config has an alpha
    has_slopes: bool = False  # scores fall with the distance, by slopes of the heads; no layer has rotary positions

    # Attention, and what replaces it.
    attention_multiplier: float = 0.0  # of scores; 0: as the config says
    norms_heads: bool = False  # queries and keys, even if these norms have no weights
    norms_whole_queries: bool = False  # across all heads together, and likewise keys
    norms_turned_heads: bool = False  # queries and keys are normed after they are rotated, not before
    grows_queries: bool = False  # with their position
    gates_outputs: bool = False
    has_sinks: bool = False  # in each head
    caps_scores: bool = False  # other families ignore this setting, which transformers keeps in any config
    caps_logits: bool = False  # likewise
    has_latents: bool = False  # in place of keys and values, see spec/latent.py
    has_short_convolutions: bool = False  # in some layers
    has_delta_rules: bool = False  # in some layers, see spec/delta.py
    delta_is_by_heads: bool = False  # their matrices are ordered by key head: all rows of one head, then the next
    state_spaces: StateSpaceSettings | None = None  # in some layers, see spec/state_space.py

    # How checkpoints store tensors.
    are_heads_together: bool = False  # in a merged qkv: queries, keys and values of one head, then those of the next
    is_transposed: bool = False  # matrices of layers are [inputs, outputs]
    # Patterns in published names, and their replacements. Here: a model saved without its head.
    renamed: tuple[tuple[str, str], ...] = ((r"^(?=(embed_tokens|layers|norm)\.)", "model."),)
    ignored: str = r"mtp\."  # how the names of unused tensors begin, here those for multi-token prediction
    has_prediction_layer: bool = False  # multi-token prediction has the tensors of one more layer

    @property
    def may_turn(self) -> bool:
        """Whether positions are rotary, in some layers at least."""
        return self.has_positions and not self.modules.positions and not self.has_slopes
