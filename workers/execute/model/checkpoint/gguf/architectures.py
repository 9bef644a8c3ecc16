"""The architectures of GGUF files that are read by tables of our own, by transformers' names of their families.

Most of the work is done by names: the package gguf knows which weight of a checkpoint becomes which tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from . import completions as complete
from . import steps
from .architecture import EXPERTS, GRANITE_MULTIPLIERS, OF_GRANITE, ROUTED_EXPERTS, Architecture, Named
from .recurrent_architectures import FAMILIES as RECURRENT

if TYPE_CHECKING:
    from .file import GgufFile

_TURNED = (r"\.self_attn\.[qk]_proj\.", steps.turned_back)  # llama.cpp's llama and those made of it
_NORM_EPS, _LAYER_NORM = "attention.layer_norm_epsilon", frozenset({"attention.layer_norm_epsilon"})
_WINDOW = {"attention.sliding_window": "sliding_window"}
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
_OF_IMAGES = frozenset({"n_deepstack_layers", "rope.dimension_sections"})  # for tokens of a text, nothing follows
_ROUTED = {**ROUTED_EXPERTS, "leading_dense_block_count": "first_k_dense_replace"}
_GRANITE = Architecture(
    settings={
        **GRANITE_MULTIPLIERS,
        "expert_shared_feed_forward_length": "intermediate_size",  # of Granite 4 without experts
    },
    needed=frozenset({"logit_scale"}),
    flags=_BIASES,
    complete=complete.granite,
    reads=frozenset({"rope.scaling.finetuned"}),
    steps=(_TURNED,),
)
_GRANITE_EXPERTS = Architecture(
    settings={
        **_GRANITE.settings,
        **EXPERTS,
        "expert_shared_feed_forward_length": "shared_intermediate_size",
    },
    needed=_GRANITE.needed,
    flags={"attention_bias": "attn_q.bias"},
    complete=complete.granite,
    reads=_GRANITE.reads,
    names=OF_GRANITE,
    steps=(_TURNED,),
)
_RANKS = {"attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank"}
_LATENTS = Architecture(
    settings={**_ROUTED, **_RANKS},
    needed=frozenset({"attention.kv_lora_rank", "rope.dimension_count"}),
    fixed={"q_lora_rank": None},
    complete=complete.latents,
    reads=complete.OF_LATENTS,
    names=(
        Named(r"\.self_attn\.kv_b_proj\.weight", ("attn_k_b.weight", "attn_v_b.weight"), steps.keys_and_values),
        Named(r"\.self_attn\.kv_b_proj\.weight", ("attn_kv_b.weight",)),  # older files
    ),
)
_XIELU = ("alpha_p", "alpha_n", "beta", "eps")
_ATTENDING: Mapping[str, Architecture] = {
    "apertus": Architecture(numbers={f".act_fn.{name}": f"xielu.{name}" for name in _XIELU}),
    "arcee": Architecture(flags=_BIASES, steps=(_TURNED,)),
    "bloom": Architecture(
        settings={_NORM_EPS: "layer_norm_epsilon"},
        needed=_LAYER_NORM,
        turns=False,
        names=(
            Named(r"^transformer\.word_embeddings_layernorm\.weight", ("token_embd_norm.weight",)),
            Named(r"^transformer\.word_embeddings_layernorm\.bias", ("token_embd_norm.bias",)),
            Named(r"\.post_attention_layernorm\.weight", ("ffn_norm.weight",)),
            Named(r"\.post_attention_layernorm\.bias", ("ffn_norm.bias",)),
        ),
        steps=((r"\.query_key_value\.", steps.by_heads),),
    ),
    "cohere": Architecture(
        settings={_NORM_EPS: "layer_norm_eps", "logit_scale": "logit_scale"},
        needed=_LAYER_NORM | {"logit_scale"},
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    ),
    "cohere2": Architecture(
        settings={_NORM_EPS: "layer_norm_eps", "logit_scale": "logit_scale", **_WINDOW},
        needed=_LAYER_NORM | {"logit_scale", *_WINDOW},
        flags={"attention_bias": "attn_q.bias"},
        complete=complete.windows(every=4),
    ),
    "deepseek_v2": _LATENTS,
    "deepseek_v3": _LATENTS,
    "dots1": Architecture(
        settings=_ROUTED,
        needed=frozenset({"expert_count", "expert_used_count"}),
        complete=complete.sigmoid_experts,
        reads=frozenset({"expert_gating_func"}),
    ),
    "ernie4_5": Architecture(flags={"use_bias": "attn_q.bias"}),
    "ernie4_5_moe": Architecture(
        settings={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        needed=frozenset({"expert_count", "expert_used_count", "leading_dense_block_count"}),
        flags={"use_bias": "attn_q.bias"},
        complete=complete.ernie_experts,
        reads=frozenset({"expert_shared_feed_forward_length"}),  # not always what it says, and in the other settings
    ),
    "exaone": Architecture(),
    "exaone4": Architecture(settings=_WINDOW, complete=complete.exaone4),
    "falcon": Architecture(
        settings={
            _NORM_EPS: "layer_norm_epsilon",
            "feed_forward_length": "ffn_hidden_size",
            "attention.head_count_kv": "num_kv_heads",
        },
        needed=_LAYER_NORM,
        flags={"bias": "attn_qkv.bias"},
        complete=complete.falcon,
        reads=frozenset({"tensor_data_layout"}),
        steps=((r"\.query_key_value\.", steps.by_key_heads),),
    ),
    "gemma": Architecture(steps=((r"norm\.weight", steps.minus_one),)),
    "glm": Architecture(flags={"attention_bias": "attn_q.bias"}, turns_in_part=True),
    "glm4": Architecture(flags={"attention_bias": "attn_q.bias"}, turns_in_part=True),
    "glm4_moe": Architecture(
        settings=_ROUTED,
        needed=frozenset({"expert_count", "expert_used_count"}),
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        complete=complete.sigmoid_experts,
        reads=frozenset({"expert_gating_func"}),
        turns_in_part=True,
    ),
    "glm4_moe_lite": _LATENTS,
    "gpt2": Architecture(
        settings={_NORM_EPS: "layer_norm_epsilon", "feed_forward_length": "n_inner"},
        needed=_LAYER_NORM,
        turns=False,
        steps=((r"\.(c_attn|c_proj|c_fc)\.weight", steps.transposed),),
    ),
    "gpt_neox": Architecture(
        settings={_NORM_EPS: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        needed=_LAYER_NORM | {"use_parallel_residual"},
        flags={"attention_bias": "attn_qkv.bias"},
        turns_in_part=True,
        steps=((r"\.query_key_value\.", steps.by_heads),),
    ),
    "gpt_oss": Architecture(
        settings={**EXPERTS, **_WINDOW, "expert_feed_forward_length": "intermediate_size"},
        needed=frozenset({"expert_count", "expert_used_count", *_WINDOW}),
        complete=complete.gpt_oss,
        names=(
            Named(r"\.experts\.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias")),
            Named(r"\.experts\.down_proj_bias", ("ffn_down_exps.bias",)),
            Named(r"\.self_attn\.sinks", ("attn_sinks.weight",)),
        ),
        steps=(
            (r"\.gate_up_proj_bias", steps.alternating),
            (r"\.gate_up_proj", steps.alternating_columns),
            (r"\.experts\.down_proj$", steps.transposed),
        ),
    ),
    "granite": _GRANITE,
    "granitemoe": _GRANITE_EXPERTS,
    "granitemoeshared": _GRANITE_EXPERTS,
    "hunyuan_v1_dense": Architecture(flags={"attention_bias": "attn_q.bias"}),
    "jais2": Architecture(settings={_NORM_EPS: "layer_norm_eps"}, needed=_LAYER_NORM, flags=_BIASES),
    "minimax_m2": Architecture(
        settings={**EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        needed=frozenset({"expert_count", "expert_used_count"}),
        complete=complete.sigmoid_experts,
        reads=frozenset({"expert_gating_func"}),
        turns_in_part=True,
    ),
    "minicpm3": Architecture(
        settings=_RANKS,
        needed=frozenset({*_RANKS, "attention.key_length", "rope.dimension_count"}),
        fixed={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},  # of the one model that there is
        complete=complete.minicpm3,
        reads=frozenset({"attention.key_length", "rope.dimension_count"}),
    ),
    "ministral3": Architecture(
        fixed={"sliding_window": None},
        needed=frozenset({"rope.scaling.original_context_length"}),
        complete=complete.ministral3,
        reads=complete.OF_MINISTRAL3,
        steps=(_TURNED,),
    ),
    "mistral": Architecture(fixed={"sliding_window": None}, steps=(_TURNED,)),
    "mixtral": Architecture(
        settings=EXPERTS, needed=frozenset(EXPERTS), fixed={"sliding_window": None}, steps=(_TURNED,)
    ),
    "nemotron": Architecture(
        settings={_NORM_EPS: "norm_eps", "attention.layer_norm_rms_epsilon": "norm_eps"},
        needed=_LAYER_NORM,
        flags=_BIASES,
        turns_in_part=True,
        steps=((r"norm\.weight", steps.minus_one),),
    ),
    "olmo": Architecture(
        settings={"attention.clamp_kqv": "clip_qkv"},
        complete=complete.olmo,
        needed=_LAYER_NORM,
        reads=_LAYER_NORM,
        steps=(_TURNED,),
    ),
    "olmo2": Architecture(),
    "olmo3": Architecture(settings=_WINDOW, complete=complete.olmo3),
    "olmoe": Architecture(
        settings={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        needed=frozenset(EXPERTS),
    ),
    "phi": Architecture(
        settings={_NORM_EPS: "layer_norm_eps"},
        needed=_LAYER_NORM,
        turns_in_part=True,
    ),
    "qwen2": Architecture(reads=_OF_IMAGES),  # the text part of the families with images, as the next two
    "qwen3": Architecture(flags={"attention_bias": "attn_q.bias"}, reads=_OF_IMAGES),
    "qwen3_moe": Architecture(
        settings={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        needed=frozenset({"expert_count", "expert_used_count"}),
        flags={"attention_bias": "attn_q.bias"},
        fixed={"norm_topk_prob": True},
        reads=_OF_IMAGES,
    ),
    "seed_oss": Architecture(flags={**_BIASES, "attention_out_bias": "attn_output.bias"}),
    "smollm3": Architecture(flags=_BIASES, steps=(_TURNED,)),
    "stablelm": Architecture(
        settings={_NORM_EPS: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        needed=_LAYER_NORM | {"use_parallel_residual"},
        flags={"use_qkv_bias": "attn_q.bias"},
        turns_in_part=True,
    ),
    "starcoder2": Architecture(
        settings={_NORM_EPS: "norm_epsilon"}, needed=_LAYER_NORM, flags={"use_bias": "attn_q.bias"}
    ),
    "youtu": replace(_LATENTS, settings=_RANKS, reads=_LATENTS.reads | _ROUTED.keys()),
}
FAMILIES: Mapping[str, Architecture] = {**_ATTENDING, **RECURRENT}
# The name of an architecture in files, and the family, or what tells it.
BY_NAME: Mapping[str, str | Callable[[GgufFile], str]] = {
    "apertus": "apertus",
    "arcee": "arcee",
    "bloom": "bloom",
    "chatglm": "glm",
    "cohere2": "cohere2",
    "command-r": "cohere",
    "deepseek2": complete.family_with_latents,
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone": "exaone",
    "exaone4": "exaone4",
    "falcon": "falcon",
    "falcon-h1": "falcon_h1",
    "gemma": "gemma",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "gpt2": "gpt2",
    "gptneox": "gpt_neox",
    "granite": "granite",
    "granitehybrid": "granitemoehybrid",
    "granitemoe": lambda file: (
        "granitemoeshared" if file.of_model("expert_shared_feed_forward_length") else "granitemoe"
    ),
    "hunyuan-dense": "hunyuan_v1_dense",
    "jais2": "jais2",
    "lfm2moe": "lfm2_moe",
    "minicpm3": "minicpm3",
    "minimax-m2": "minimax_m2",
    "mistral3": lambda file: "ministral3" if file.of_model("attention.temperature_scale") else "mistral",
    "nemotron": "nemotron",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "olmo": "olmo",
    "olmo2": lambda file: "olmo3" if file.of_model("attention.sliding_window") else "olmo2",
    "olmoe": "olmoe",
    "phi2": "phi",
    "qwen2vl": "qwen2",
    "qwen3next": "qwen3_next",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3_moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}


def family_of(file: GgufFile) -> str | None:
    """Transformers' name of the family that a table of ours reads; None for architectures that its reader knows."""
    if file.architecture == "llama" and file.of_model("expert_count"):
        return "mixtral"
    family = BY_NAME.get(file.architecture)
    return family(file) if callable(family) else family
