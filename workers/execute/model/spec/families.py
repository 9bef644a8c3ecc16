"""What the models of each family have in common, where it differs from Llama.

A family is added by stating its facts here. What its models may choose is in their configs, see ``spec/decoder.py``.
"""

from __future__ import annotations

from dataclasses import replace

from .family import Family, Modules
from .hybrid_families import HYBRIDS

_SANDWICHED = Modules(
    mlp_norm="pre_feedforward_layernorm",
    attended_norm="post_attention_layernorm",
    gated_norm="post_feedforward_layernorm",
)
_NORMED_AFTER = replace(_SANDWICHED, attention_norm="", mlp_norm="")
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
    num_group_tops=2,
)
_LATENT = Family(has_latents=True, turns_neighbours=True)
_LATENT_EXPERTS = replace(_SIGMOID_EXPERTS, has_latents=True, turns_neighbours=True, has_prediction_layer=True)
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
    activation="silu",
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
_SHARED_SIZE = "shared_expert_intermediate_size"
_DELTA_EXPERTS = replace(
    _DELTA, has_experts=True, shared_size=_SHARED_SIZE, gates_shared_expert=True, slides_everywhere=True
)

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

_BLOOM = replace(
    _FALCON,
    modules=replace(
        _FALCON.modules,
        embedding_norm="transformer.word_embeddings_layernorm",
        mlp_norm="post_attention_layernorm",
    ),
    activation="gelu_pytorch_tanh",
    mlp_size="",
    kv_heads="",
    is_parallel=False,
    has_slopes=True,
    renamed=((r"^(?=(word_embeddings|word_embeddings_layernorm|h|ln_f)\.)", "transformer."),),
)

_EXAONE = Family(
    renamed=(
        (r"^(transformer\.)?wte\.", "model.embed_tokens."),
        (r"^(transformer\.)?h\.", "model.layers."),
        (r"^(transformer\.)?ln_f\.", "model.norm."),
        (r"\.attn\.attention\.out_proj\b", ".self_attn.o_proj"),
        (r"\.attn\.attention\.", ".self_attn."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.mlp\.c_fc_0\b", ".mlp.gate_proj"),
        (r"\.mlp\.c_fc_1\b", ".mlp.up_proj"),
        (r"\.mlp\.c_proj\b", ".mlp.down_proj"),
    ),
)

FAMILIES: dict[str, Family] = {
    "apertus": Family(
        modules=replace(_UNGATED, attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
        has_gates=False,
    ),
    "arcee": Family(modules=_UNGATED, has_gates=False),
    "bloom": _BLOOM,
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, turns_where_it_slides=True),
    "cwm": _LLAMA,
    "deepseek_v2": replace(
        _LATENT_EXPERTS,
        has_sigmoid_routers=False,
        scales_experts=True,
        num_group_tops=1,
        groups_setting="topk_method",
    ),
    "deepseek_v3": _LATENT_EXPERTS,
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
    "exaone": _EXAONE,
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
    "glm4_moe_lite": replace(_LATENT_EXPERTS, first_experts="", lists_expert_layers=True),
    "granite": _LLAMA,
    "granitemoe": Family(
        modules=Modules(router="block_sparse_moe.router.layer", experts="block_sparse_moe.experts"),
        has_experts=True,
        num_experts="num_local_experts",
    ),
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
    "minimax_m2": Family(
        modules=Modules(
            router="block_sparse_moe.gate",
            router_biases="block_sparse_moe.e_score_correction_bias",
            experts="block_sparse_moe.experts",
            expert=("w1", "w3", "w2"),
        ),
        has_experts=True,
        num_experts="num_local_experts",
        has_sigmoid_routers=True,
        norms_whole_queries=True,
        turns_in_part=True,
    ),
    "minicpm3": replace(_LATENT, turns_neighbours=False, embedding_setting="scale_emb", scales_by_depth=True),
    "ministral": _LLAMA,
    "ministral3": replace(_SLIDING, grows_queries=True),
    "mistral": _SLIDING,
    "mixtral": replace(
        _EXPERTS,
        modules=Modules(router="block_sparse_moe.gate", experts="block_sparse_moe.experts", expert=("w1", "w3", "w2")),
    ),
    "nanochat": Family(
        modules=Modules(embedding_norm="model.norm", gate_up=("mlp.fc1",), down="mlp.fc2"),
        has_gates=False,
        norms_heads=True,
        norms_turned_heads=True,
        turns_back=True,
        caps_logits=True,
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
    "phi3": replace(_SLIDING, modules=_MERGED, turns_in_part=True),
    "qwen2": _LLAMA,
    "qwen2_moe": replace(_CHOOSY_EXPERTS, shared_size=_SHARED_SIZE, gates_shared_expert=True),
    "qwen3": _LLAMA,
    "qwen3_5_moe_text": _DELTA_EXPERTS,
    "qwen3_5_text": _DELTA,
    "qwen3_moe": _CHOOSY_EXPERTS,
    "qwen3_next": replace(_DELTA_EXPERTS, may_norm_expert_weights=True, delta_is_by_heads=True),
    "sarvam_mla": _LATENT_EXPERTS,
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
    **HYBRIDS,
    "youtu": _LATENT,
}
