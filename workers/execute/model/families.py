"""What the models of each family have in common, where it differs from Llama.

A family is added by stating its facts here. What its models may choose is in their configs, see ``decoder_spec.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """The names of modules in checkpoints: of the model, and of each of its layers."""

    embedding: str = "model.embed_tokens"
    positions: str = ""  # the table of learned positions; "": the family has none
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
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family; the defaults describe Llama."""

    modules: Modules = Modules()
    activation: str = "hidden_act"  # the name of the setting; "": it is always silu
    mlp_size: str = "intermediate_size"  # the name of the setting; "": it is that of the tensors
    kv_heads: str = "num_key_value_heads"  # likewise; "": as many as there are for queries
    layer_types: str = "layer_types"  # likewise
    window: str = "sliding_window"  # likewise
    norm_eps: str = "rms_norm_eps"  # likewise; "": it is that of torch
    has_layer_norms: bool = False
    has_gates: bool = True  # in MLPs
    norm_offset: float = 0.0  # what stored norm weights are offsets from
    scales_embedding: bool = False  # by the square root of the hidden size, rounded to the dtype of the model
    is_parallel: bool = False  # attention and MLP read the same x
    parallel: str = ""  # or the name of the setting
    logits_setting: str = "logits_scaling"  # the name of the setting: what logits are divided by
    multiplies_logits: bool = False  # it is a factor instead
    has_experts: bool = False
    num_experts: str = "num_experts"  # the name of the setting
    # Likewise: only every so many layers have experts, from the first to the last of them; "": no setting says so.
    expert_step: str = "decoder_sparse_step"
    first_experts: str = ""
    last_experts: str = ""
    lists_expert_layers: bool = False  # as "sparse" in mlp_layer_types instead
    has_shared_expert: bool = False  # weighted by a sigmoid
    num_shared_experts: str = ""  # the name of the setting, in families that have some: they are one with weight 1
    has_sigmoid_routers: bool = False
    router_biases_axes: tuple[int, ...] = ()  # before that of the experts
    may_norm_expert_weights: bool = False  # as the config says; otherwise they are always normed
    slides_everywhere: bool = False  # all layers have a window if the config has one, and names no types of layers
    may_lack_positions: bool = False  # as the config says
    turns_where_it_slides: bool = False  # if some layers have a window, only those have positions
    first_position: int = 0  # the row of the first one in the table of learned positions
    norms_whole_queries: bool = False  # across all heads together, and likewise keys
    norms_turned_heads: bool = False  # queries and keys are normed after they are rotated, not before
    grows_queries: bool = False  # with their position
    gates_outputs: bool = False  # of attention
    turns_in_part: bool = False  # positions may rotate only the first channels of each head
    rotary_channels: str = ""  # of each head, the name of the setting, in families without rotary parameters
    turns_neighbours: bool = False  # positions rotate channel 2i with 2i + 1, not i with i + half of them
    has_ntk_alpha: bool = False  # "dynamic" positions have a fixed base if the config has an alpha
    attention_multiplier: float = 0.0  # of scores; 0: as the config says
    has_sinks: bool = False  # in each head
    has_limits: bool = False  # on gates and ups
    # Settings that transformers keeps if any config has them, but uses in these families only.
    caps_scores: bool = False
    caps_logits: bool = False
    are_heads_together: bool = False  # in a merged qkv: queries, keys and values of one head, then those of the next
    is_transposed: bool = False  # matrices of layers are stored as [inputs, outputs]
    renamed: tuple[tuple[str, str], ...] = ()  # patterns in the names of published tensors, and what replaces them
    ignored: str = r"mtp\."  # how the names of tensors without effect begin, such as those for multi-token prediction
    has_prediction_layer: bool = False  # or those of one more layer are for it
    has_short_convolutions: bool = False  # in some layers, in place of attention
    has_delta_rules: bool = False  # in some layers, see delta_spec.py
    delta_is_by_heads: bool = False  # their matrices are ordered by key head: all rows of one head, then the next


_SANDWICHED = Modules(
    mlp_norm="pre_feedforward_layernorm",
    attended_norm="post_attention_layernorm",
    gated_norm="post_feedforward_layernorm",
)
_NORMED_AFTER = replace(_SANDWICHED, attention_norm="", mlp_norm="")
_GRANITE_4 = Modules(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
_MERGED = Modules(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))

_LLAMA = Family()
_SLIDING = Family(slides_everywhere=True)
_EXPERTS = Family(has_experts=True, slides_everywhere=True)
_CHOOSY_EXPERTS = replace(_EXPERTS, may_norm_expert_weights=True)
_SIGMOID_EXPERTS = Family(
    modules=Modules(shared="mlp.shared_experts"),
    has_experts=True,
    num_experts="n_routed_experts",
    first_experts="first_k_dense_replace",
    num_shared_experts="n_shared_experts",
    has_sigmoid_routers=True,
    may_norm_expert_weights=True,
)
_OLMO = Family(modules=_NORMED_AFTER, norms_whole_queries=True)
_GEMMA = Family(norm_offset=1.0, scales_embedding=True)
_GEMMA_3 = replace(_GEMMA, modules=_SANDWICHED, activation="hidden_activation", caps_logits=True)
_GLM = Family(
    modules=Modules(
        gate_up=("mlp.gate_up_proj",), attended_norm="post_self_attn_layernorm", gated_norm="post_mlp_layernorm"
    ),
    turns_in_part=True,
    turns_neighbours=True,
)
_LFM = Family(
    modules=Modules(
        output="self_attn.out_proj",
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        router="feed_forward.gate",
        router_biases="feed_forward.expert_bias",
        experts="feed_forward.experts",
        expert=("w1", "w3", "w2"),
        final_norm="model.embedding_norm",
    ),
    activation="",
    norm_eps="norm_eps",
    has_short_convolutions=True,
)
_UNGATED = Modules(gate_up=("mlp.up_proj",))
_JAIS = Family(modules=_UNGATED, norm_eps="layer_norm_eps", has_layer_norms=True, has_gates=False)
_COHERE = Family(
    modules=Modules(mlp_norm="input_layernorm"),
    norm_eps="layer_norm_eps",
    has_layer_norms=True,
    is_parallel=True,
    turns_neighbours=True,
    logits_setting="logit_scale",
    multiplies_logits=True,
)
_DELTA = Family(norm_offset=1.0, gates_outputs=True, turns_in_part=True, has_delta_rules=True)
_DELTA_EXPERTS = replace(_DELTA, has_experts=True, has_shared_expert=True, slides_everywhere=True)

_GPT_2 = Family(
    modules=Modules(
        embedding="transformer.wte",
        positions="transformer.wpe",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
        attention_norm="ln_1",
        mlp_norm="ln_2",
    ),
    activation="activation_function",
    mlp_size="",
    kv_heads="",
    norm_eps="layer_norm_epsilon",
    has_layer_norms=True,
    has_gates=False,
    is_transposed=True,
    renamed=((r"^(?=(wte|wpe|h|ln_f)\.)", "transformer."),),
    ignored=r"transformer\.h\.\d+\.attn\.(attention\.)?(masked_)?bias",  # masks
)
_GPT_NEO = replace(
    _GPT_2,
    modules=replace(
        _GPT_2.modules,
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        output="attn.attention.out_proj",
    ),
    layer_types="attention_layers",
    window="window_size",
    attention_multiplier=1.0,
    is_transposed=False,
)
_GPT_J = replace(
    _GPT_2,
    modules=replace(
        _GPT_2.modules,
        positions="",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.out_proj",
        gate_up=("mlp.fc_in",),
        down="mlp.fc_out",
        mlp_norm="ln_1",
    ),
    is_parallel=True,
    rotary_channels="rotary_dim",
    turns_neighbours=True,
    is_transposed=False,
)
_OPT = Family(
    modules=Modules(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        output="self_attn.out_proj",
        gate_up=("fc1",),
        down="fc2",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
    ),
    activation="activation_function",
    mlp_size="ffn_dim",
    kv_heads="",
    norm_eps="",
    has_layer_norms=True,
    has_gates=False,
    first_position=2,
    renamed=((r"^(?=decoder\.)", "model."),),
)
_GPT_NEOX = Family(
    modules=Modules(
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        qkv=("attention.query_key_value",),
        output="attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    kv_heads="",
    norm_eps="layer_norm_eps",
    has_layer_norms=True,
    has_gates=False,
    parallel="use_parallel_residual",
    turns_in_part=True,
    are_heads_together=True,
    renamed=((r"^embed_out\.", "lm_head."),),
    ignored=r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias",  # masks
)
_FALCON = replace(
    _GPT_NEOX,
    modules=replace(
        _GPT_NEOX.modules,
        embedding="transformer.word_embeddings",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        qkv=("self_attention.query_key_value",),
        output="self_attention.dense",
        mlp_norm="input_layernorm",
    ),
    activation="activation",
    mlp_size="ffn_hidden_size",
    kv_heads="num_kv_heads",
    norm_eps="layer_norm_epsilon",
    is_parallel=True,
    parallel="",
    turns_in_part=False,
    renamed=(),
)

FAMILIES: dict[str, Family] = {
    "apertus": Family(
        modules=replace(_UNGATED, attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
        has_gates=False,
    ),
    "arcee": Family(modules=_UNGATED, has_gates=False),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, turns_where_it_slides=True),
    "cwm": _LLAMA,
    "dots1": _SIGMOID_EXPERTS,
    "ernie4_5": Family(turns_neighbours=True),
    "ernie4_5_moe": Family(
        modules=Modules(router_biases="mlp.moe_statics.e_score_correction_bias", shared="mlp.shared_experts"),
        has_experts=True,
        expert_step="moe_layer_interval",
        first_experts="moe_layer_start_index",
        last_experts="moe_layer_end_index",
        num_shared_experts="moe_num_shared_experts",
        router_biases_axes=(1,),
        ignored=r"model\.mtp_",
        turns_neighbours=True,
    ),
    "exaone4": Family(modules=_NORMED_AFTER, turns_where_it_slides=True),
    "falcon": _FALCON,
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA_3, caps_scores=True),
    "gemma3_text": _GEMMA_3,
    "gpt_oss": replace(_EXPERTS, modules=Modules(router="mlp.router"), has_sinks=True, has_limits=True),
    "glm": replace(_GLM, modules=Modules(gate_up=("mlp.gate_up_proj",))),
    "glm4": _GLM,
    "glm4_moe": replace(_SIGMOID_EXPERTS, turns_in_part=True, has_prediction_layer=True),
    "gpt2": _GPT_2,
    "gpt_bigcode": replace(_GPT_2, are_heads_together=True, is_transposed=False),
    "gpt_neo": _GPT_NEO,
    "gpt_neox": _GPT_NEOX,
    "gptj": _GPT_J,
    "granite": _LLAMA,
    "granitemoe": Family(
        modules=Modules(router="block_sparse_moe.router.layer", experts="block_sparse_moe.experts"),
        has_experts=True,
        num_experts="num_local_experts",
    ),
    "granitemoehybrid": Family(modules=_GRANITE_4, mlp_size="shared_intermediate_size", may_lack_positions=True),
    "helium": Family(turns_neighbours=True),
    "hunyuan_v1_dense": Family(
        modules=Modules(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"),
        norms_turned_heads=True,
        has_ntk_alpha=True,
    ),
    "hyperclovax": Family(modules=Modules(attended_norm="post_norm1", gated_norm="post_norm2"), multiplies_logits=True),
    "internlm3": _LLAMA,
    "iquestcoder": _LLAMA,
    "jais2": _JAIS,
    "lfm2": replace(_LFM, mlp_size=""),
    "lfm2_moe": replace(
        _LFM,
        has_experts=True,
        first_experts="num_dense_layers",
        has_sigmoid_routers=True,
        may_norm_expert_weights=True,
    ),
    "llama": _LLAMA,
    "mellum": Family(has_experts=True, lists_expert_layers=True, may_norm_expert_weights=True),
    "ministral": _LLAMA,
    "ministral3": replace(_SLIDING, grows_queries=True),
    "mistral": _SLIDING,
    "mixtral": replace(
        _EXPERTS,
        modules=Modules(router="block_sparse_moe.gate", experts="block_sparse_moe.experts", expert=("w1", "w3", "w2")),
    ),
    "nemotron": replace(_JAIS, norm_eps="norm_eps", norm_offset=1.0, turns_in_part=True),
    "olmo": Family(norm_eps="", has_layer_norms=True),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "olmoe": replace(_CHOOSY_EXPERTS, norms_whole_queries=True),
    "opt": _OPT,
    "phi": Family(
        modules=Modules(
            output="self_attn.dense",
            gate_up=("mlp.fc1",),
            down="mlp.fc2",
            mlp_norm="input_layernorm",
            final_norm="model.final_layernorm",
        ),
        norm_eps="layer_norm_eps",
        has_layer_norms=True,
        has_gates=False,
        is_parallel=True,
        turns_in_part=True,
    ),
    "phi3": replace(_SLIDING, modules=_MERGED),
    "qwen2": _LLAMA,
    "qwen2_moe": replace(_CHOOSY_EXPERTS, has_shared_expert=True),
    "qwen3": _LLAMA,
    "qwen3_5_moe_text": _DELTA_EXPERTS,
    "qwen3_5_text": _DELTA,
    "qwen3_moe": _CHOOSY_EXPERTS,
    "qwen3_next": replace(_DELTA_EXPERTS, may_norm_expert_weights=True, delta_is_by_heads=True),
    "seed_oss": _LLAMA,
    "smollm3": _LLAMA,
    "stablelm": Family(norm_eps="layer_norm_eps", has_layer_norms=True, turns_in_part=True),
    "starcoder2": replace(
        _SLIDING,
        modules=Modules(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
        norm_eps="norm_epsilon",
        has_layer_norms=True,
        has_gates=False,
    ),
    "vaultgemma": replace(_GEMMA_3, modules=Modules(mlp_norm="pre_feedforward_layernorm"), caps_scores=True),
}
