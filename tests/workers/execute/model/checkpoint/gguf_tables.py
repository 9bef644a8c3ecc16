"""Tiny models of the architectures that a table of ours reads, and what llama.cpp's converter writes of them.

Every case was compared with files that the converter itself wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from transformers import CONFIG_MAPPING, PreTrainedModel

from tests.tiny import LLAMA_LIKE, build_tiny_model
from tests.workers.execute.model.native import families as native_families

Array = npt.NDArray[Any]
_COMMON = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
}
_NORM = {"layer_norm_eps": "attention.layer_norm_epsilon", "layer_norm_epsilon": "attention.layer_norm_epsilon"}
_EXPERTS = {
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_STATE_SPACE = {
    "mamba_d_conv": "ssm.conv_kernel", "mamba_d_state": "ssm.state_size", "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}  # fmt: skip
_LATENTS = {"q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank"}
_ERNIE = {
    "moe_num_experts": "expert_count", "moe_k": "expert_used_count", "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_interval": "interleave_moe_layer_step", "moe_layer_start_index": "leading_dense_block_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip


class Case(NamedTuple):
    architecture: str
    family: str
    stated: dict[str, str] = {}  # attributes of the config, and the settings they are, beside the common ones
    extra: Callable[[Any], dict[str, Any]] = lambda config: {}  # settings that are no attribute; None removes one
    options: dict[str, Any] = {}  # of the model; ``...`` removes one


def _windows(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types]}


def _turned(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"rope.dimension_count": int(head_dim * config.rope_parameters["partial_rotary_factor"])}


def _latents(config: Any) -> dict[str, Any]:
    stretch = config.rope_parameters.get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.scaling.yarn_log_multiplier": 0.1 * stretch if stretch else None,
    }


def _heads_of_layers(config: Any, attends: str) -> dict[str, Any]:
    kinds = getattr(config, "layer_types", None) or config.layers_block_type
    return {"attention.head_count_kv": [config.num_key_value_heads * (kind == attends) for kind in kinds]}


_FOLDED: dict[str, Any] = {  # multipliers of Falcon-H1 are in the weights
    **dict.fromkeys((
        "embedding_multiplier", "attention_in_multiplier", "key_multiplier", "attention_out_multiplier",
        "ssm_in_multiplier", "ssm_out_multiplier", "lm_head_multiplier",
    ), 1.0),
    "mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5, "mamba_norm_before_gate": False,
    "mamba_rms_norm": True,
}  # fmt: skip
_TURNING = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_BARE = {"head_dim": ...}
_NUMBER = ".act_fn."  # among the settings
_STRETCHED = {"rope_parameters": {**native_families._SHARPENED, "mscale": 0.7, "mscale_all_dim": 0.7}}
_STRETCHED_ONCE = {"rope_parameters": {**native_families._SHARPENED, "mscale": 1.0, "mscale_all_dim": 1.0}}
_LONG = {  # all of them are also numbers of 32 bits
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512,
    "short_factor": [1.0, 1.125, 1.25, 1.75, 2.5, 4.0, 7.0, 9.0], "long_factor": [8.0] * 8,
}  # fmt: skip
_HYBRID = {"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope", "head_dim": 32}
CASES = {
    case.family: case
    for case in (
        Case("apertus", "apertus", options=_TURNING),
        Case("arcee", "arcee"),
        Case("bloom", "bloom", _NORM, lambda _: {"rope.freq_base": None, "attention.head_count_kv": 6}, _BARE),
        Case("command-r", "cohere", {**_NORM, "logit_scale": "logit_scale"}, lambda _: {"rope.scaling.type": "none"}),
        Case(
            "cohere2", "cohere2", {**_NORM, "logit_scale": "logit_scale"}, lambda _: {"rope.dimension_count": 32},
            {"layer_types": ["sliding_attention"] * 3, "head_dim": 32},
        ),
        Case("deepseek2", "deepseek_v2", {**_EXPERTS, **_LATENTS}, _latents, _STRETCHED),
        Case("deepseek2", "deepseek_v3", {**_EXPERTS, **_LATENTS},
             lambda config: {**_latents(config), "expert_gating_func": 2}, _STRETCHED_ONCE),
        Case("dots1", "dots1", _EXPERTS, lambda _: {"attention.sliding_window": None, "expert_gating_func": 2}),
        Case("ernie4_5", "ernie4_5"),
        Case("ernie4_5-moe", "ernie4_5_moe", _ERNIE, lambda _: {"expert_shared_feed_forward_length": 48}),
        Case("exaone", "exaone"),
        Case("exaone4", "exaone4", extra=_windows),
        Case(
            "falcon", "falcon", {**_NORM, "ffn_hidden_size": "feed_forward_length"},
            lambda _: {"attention.head_count_kv": 2, "tensor_data_layout": "jploski"}, {"ffn_hidden_size": 512},
        ),
        Case("falcon-h1", "falcon_h1", {**_STATE_SPACE, "mamba_d_ssm": "ssm.inner_size"}, options=_FOLDED),
        Case("gemma", "gemma"),
        Case("chatglm", "glm", extra=_turned, options=_HALF),
        Case("glm4", "glm4", extra=_turned, options=_HALF),
        Case("glm4moe", "glm4_moe", _EXPERTS, lambda config: {**_turned(config), "expert_gating_func": 2}, _HALF),
        Case("deepseek2", "glm4_moe_lite", {**_EXPERTS, **_LATENTS},
             lambda config: {**_latents(config), "leading_dense_block_count": 1, "tokenizer.ggml.pre": "glm4"}),
        Case("gpt2", "gpt2", _NORM, lambda _: {"rope.freq_base": None, "feed_forward_length": 512,
                                               "attention.head_count_kv": None}, _BARE),
        Case("gptneox", "gpt_neox", {**_NORM, "use_parallel_residual": "use_parallel_residual"},
             lambda config: {**_turned(config), "attention.head_count_kv": None, "rope.freq_base": None},
             {**_BARE, "hidden_act": "gelu"}),
        Case("gpt-oss", "gpt_oss", _EXPERTS, lambda _: {"expert_feed_forward_length": 96}, {"swiglu_limit": 7.0}),
        Case("granite", "granite", _GRANITE, lambda _: {"rope.dimension_count": 32}, _BARE),
        Case("granitemoe", "granitemoe", {**_GRANITE, **_EXPERTS}, options=_BARE),
        Case(
            "granitehybrid", "granitemoehybrid",
            {**_GRANITE, **_EXPERTS, **_STATE_SPACE, "shared_intermediate_size": "expert_shared_feed_forward_length"},
            lambda config: {**_heads_of_layers(config, "full_attention"), "rope.scaling.finetuned": False,
                            "ssm.inner_size": 256},
            {**_HYBRID, "mamba_n_heads": 16},
        ),
        Case("hunyuan-dense", "hunyuan_v1_dense", options=_TURNING),
        Case("jais2", "jais2", _NORM),
        Case(
            "lfm2moe", "lfm2_moe",
            {**_EXPERTS, "norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache",
             "num_dense_layers": "leading_dense_block_count"},
            lambda config: {**_heads_of_layers(config, "full_attention"), "expert_gating_func": 2,
                            "expert_weights_scale": None, "expert_weights_norm": None},
            {"routed_scaling_factor": 1.0},
        ),
        Case("minicpm3", "minicpm3", _LATENTS,
             lambda config: {"attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
                             "rope.dimension_count": config.qk_rope_head_dim},
             {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "rope_parameters": _LONG}),
        Case("mistral3", "ministral3", extra=lambda config: {
            "attention.temperature_scale": 0.5, "rope.scaling.yarn_log_multiplier": 1.0,
        }, options={"rope_parameters": {**native_families.FAMILIES["ministral3"]["rope_parameters"],
                                        "llama_4_scaling_beta": 0.5}}),
        Case("mistral3", "mistral", options={"sliding_window": None}),
        Case("minimax-m2", "minimax_m2", _EXPERTS, lambda config: {**_turned(config),
                                                                  "expert_feed_forward_length": 40}),
        Case("llama", "mixtral", _EXPERTS),
        Case("nemotron", "nemotron", {"norm_eps": "attention.layer_norm_epsilon"},
             lambda config: {**_turned(config), "attention.layer_norm_rms_epsilon": 1e-5}),
        Case(
            "nemotron_h_moe", "nemotron_h",
            {**_EXPERTS, **_NORM, "conv_kernel": "ssm.conv_kernel", "ssm_state_size": "ssm.state_size",
             "n_groups": "ssm.group_count", "mamba_num_heads": "ssm.time_step_rank",
             "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
            lambda config: {**_heads_of_layers(config, "full_attention"), "feed_forward_length": [0, 96, 0, 40],
                            "ssm.inner_size": 128, "rope.dimension_count": 32, "rope.scaling.finetuned": False},
        ),
        Case("olmo", "olmo", {"clip_qkv": "attention.clamp_kqv"},
             lambda _: {"attention.layer_norm_epsilon": 1e-5}),
        Case("olmo2", "olmo2"),
        Case("olmo2", "olmo3", extra=lambda config: {**_windows(config), "rope.freq_base_swa": 1e4}),
        Case("olmoe", "olmoe", _EXPERTS, lambda _: {"expert_weights_norm": None}, _BARE),
        Case("phi2", "phi", _NORM, _turned, {"num_key_value_heads": 4, "intermediate_size": 256}),
        Case("qwen2vl", "qwen2", extra=lambda _: {"rope.dimension_sections": [4, 6, 6, 0]}, options=_BARE),
        Case("qwen3vl", "qwen3", extra=lambda _: {"rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 3}),
        Case("qwen3vlmoe", "qwen3_moe", _EXPERTS, lambda _: {"expert_weights_norm": None},
             {"mlp_only_layers": [], "norm_topk_prob": True}),
        Case(
            "qwen3next", "qwen3_next",
            {**_EXPERTS, "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
             "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
             "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
            lambda config: {**_turned(config), "ssm.inner_size": 96, "expert_weights_norm": None,
                            "full_attention_interval": 4},
            {"mlp_only_layers": []},
        ),
        Case("seed_oss", "seed_oss"),
        Case("smollm3", "smollm3", options={"no_rope_layers": None, "num_hidden_layers": 5}),
        Case("stablelm", "stablelm", {**_NORM, "use_parallel_residual": "use_parallel_residual"}, _turned),
        Case("starcoder2", "starcoder2", {"norm_epsilon": "attention.layer_norm_epsilon"},
             options={"sliding_window": None}),
        Case("deepseek2", "youtu", _LATENTS,
             lambda config: {**_latents(config), "expert_shared_count": 0, "expert_feed_forward_length": 96},
             {"rope_interleave": True}),
    )
    if case.family in CONFIG_MAPPING  # some are newer
}  # fmt: skip


def build(case: Case) -> PreTrainedModel:
    own = native_families.FAMILIES.get(case.family, {})
    options = {**LLAMA_LIKE, "hidden_size": 128, "intermediate_size": 96, **own, **case.options}
    model = build_tiny_model(case.family, **{key: value for key, value in options.items() if value is not ...})
    for index, (name, weight) in enumerate(model.state_dict().items()):
        if _NUMBER in name:  # another one in each layer
            weight.fill_(index / 128)
    return model


def write(
    path: Path,
    case: Case,
    model: PreTrainedModel,
    *,
    tensors: Callable[[str, Array], Array] = lambda name, array: array,
    merges_latents: bool = False,
    **settings: Any,
) -> None:
    """Write ``model`` without a tokenizer. ``settings`` are added or replace others. What ``tensors`` makes bytes of is
    in MXFP4. ``merges_latents`` as older converters did.
    """
    writer = gguf.GGUFWriter(path, case.architecture)
    writer.add_tokenizer_pre(settings.pop("pre", None) or settings_of(case, model.config).get("tokenizer.ggml.pre", ""))
    for key, value in {**settings_of(case, model.config), **settings}.items():
        if value is None or key.startswith("tokenizer."):
            continue
        name = f"{case.architecture}.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    for name in ("alpha_p", "alpha_n", "beta", "eps") if case.family == "apertus" else ():
        numbers = [float(weight) for key, weight in model.state_dict().items() if key.endswith(f"{_NUMBER}{name}")]
        writer.add_array(f"xielu.{name}", numbers)
    for name, array in tensors_of(case, model, merges_latents=merges_latents or case.family == "minicpm3"):
        made = np.ascontiguousarray(tensors(name, array))
        writer.add_tensor(name, made, raw_dtype=Type.MXFP4 if made.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def settings_of(case: Case, config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4}
    rope = rope.get("full_attention", rope)
    stated: dict[str, Any] = {"block_count": config.num_hidden_layers, "rope.freq_base": float(rope["rope_theta"])}
    if rope.get("rope_type") == "yarn":
        stated |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"), "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }  # fmt: skip
    for attribute, key in {**_COMMON, **case.stated}.items():
        if (value := getattr(config, attribute, None)) is not None:
            stated[key] = value
    return {**stated, **case.extra(config)}


_OWN_NAMES = {
    "e_score_correction_bias": "exp_probs_b.bias", "expert_bias": "exp_probs_b.bias", "dt_bias": "ssm_dt.bias",
    "sinks": "attn_sinks.weight", "gate_up_proj_bias": "ffn_{}_exps.bias", "down_proj_bias": "ffn_down_exps.bias",
    "experts.gate_up_proj": "ffn_{}_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
    "experts.up_proj": "ffn_up_exps.weight", "pre_ff_layernorm.weight": "ffn_norm",
    "shared_mlp.input_linear.weight": "ffn_{}_shexp.weight", "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    "sparse_moe.router.weight": "ffn_gate_inp.weight", "kv_b_proj.weight": "attn_{}_b.weight",
    "in_proj_qkvz.weight": "attn_{}.weight",
}  # fmt: skip
_OF_BLOOM = {
    "word_embeddings_layernorm.weight": "token_embd_norm.weight",
    "word_embeddings_layernorm.bias": "token_embd_norm.bias",
    "post_attention_layernorm.weight": "ffn_norm.weight", "post_attention_layernorm.bias": "ffn_norm.bias",
}  # fmt: skip
_OF_MIXERS = {
    "A_log": "ssm_a", "D": "ssm_d", "conv1d.weight": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias",
    "in_proj.weight": "ssm_in.weight", "mixer.norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight",
    "shared_experts.up_proj.weight": "ffn_up_shexp.weight", "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "up_proj.weight": "ffn_up.weight", "down_proj.weight": "ffn_down.weight", "q_proj.weight": "attn_q.weight",
    "k_proj.weight": "attn_k.weight", "v_proj.weight": "attn_v.weight", "o_proj.weight": "attn_output.weight",
    "gate.weight": "ffn_gate_inp.weight",
}  # fmt: skip


def tensors_of(case: Case, model: PreTrainedModel, *, merges_latents: bool = False) -> Iterator[tuple[str, Array]]:
    """The weights of a model by llama.cpp's names, in its layout."""
    config: Any = model.config
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[case.architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    own = {
        **_OWN_NAMES,
        **({"kv_b_proj.weight": "attn_kv_b.weight"} if merges_latents else {}),
        **{"bloom": _OF_BLOOM, "nemotron_h": _OF_MIXERS}.get(case.family, {}),
    }
    for name, tensor in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or _NUMBER in name:
            continue
        layer = next((part for part in name.split(".") if part.isdecimal()), None)
        found = next((own[end] for end in own if name.endswith(end)), None)
        if found is not None:
            found = found if layer is None else f"blk.{layer}.{found}"
        else:
            base, dot, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
            found = f"{names.get_name(base)}{dot}{suffix}"
        is_whole = merges_latents and "kv_b_proj" in name
        parts = [("", tensor.numpy())] if is_whole else _changed(name, tensor.numpy(), case, config)
        for part, array in parts:
            yield found.format(part), array
    for kind in ("long", "short"):
        if (factors := (getattr(config, "rope_parameters", None) or {}).get(f"{kind}_factor")) is not None:
            yield f"rope_factors_{kind}.weight", np.array(factors, np.float32)


def _changed(name: str, array: Array, case: Case, config: Any) -> Iterator[tuple[str, Array]]:
    """What the converter makes of a weight, in parts."""
    if case.family == "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        array = array.swapaxes(1, 2)
    if name.endswith(("gate_up_proj", "gate_up_proj_bias")) and "experts" in name:
        by_turns = case.family == "gpt_oss"
        gates, ups = (array[:, ::2], array[:, 1::2]) if by_turns else np.split(array, 2, axis=1)
        yield from (("gate", gates), ("up", ups))
    elif "shared_mlp.input_linear" in name:
        yield from zip(("gate", "up"), np.split(array, 2), strict=True)
    elif "kv_b_proj" in name:
        keys = array.reshape(config.num_attention_heads, -1, array.shape[-1])
        yield "k", keys[:, : config.qk_nope_head_dim].swapaxes(1, 2)
        yield "v", keys[:, config.qk_nope_head_dim :]
    elif "in_proj_qkvz" in name:
        sizes = np.cumsum([config.linear_key_head_dim] * 2 + [3 * config.linear_value_head_dim])
        parts = np.split(array.reshape(config.linear_num_key_heads, -1, array.shape[-1]), sizes, axis=1)
        flat = [part.reshape(-1, array.shape[-1]) for part in parts]
        yield from (("qkv", np.concatenate(flat[:3])), ("gate", flat[3]))
    else:
        yield "", _moved(name, array, case, config)


_TURNED = {
    "arcee", "granite", "granitemoe", "granitemoehybrid", "ministral3", "mistral", "mixtral", "nemotron_h", "olmo",
    "smollm3",
}  # fmt: skip


def _moved(name: str, array: Array, case: Case, config: Any) -> Array:
    family, heads = case.family, getattr(config, "num_attention_heads", 1)
    if family in _TURNED and name.endswith(("q_proj.weight", "k_proj.weight")):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return array.reshape(-1, 2, head_dim // 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
    if name.endswith("norm.weight") and "linear_attn" not in name and family in ("gemma", "nemotron", "qwen3_next"):
        return array + 1
    if family == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return array.T
    if "query_key_value" in name and family in ("bloom", "gpt_neox"):
        return array.reshape(heads, 3, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
    if "query_key_value" in name:  # two queries to a key
        groups = array.reshape(config.num_kv_heads, heads // config.num_kv_heads + 2, -1, *array.shape[1:])
        return np.concatenate(
            [part.reshape(-1, *array.shape[1:]) for part in (groups[:, :-2], groups[:, -2], groups[:, -1])]
        )
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        return array[:, 0]
    if name.endswith("A_log"):
        return -np.exp(array).reshape(-1, *([] if family == "qwen3_next" else [1]))
    if name.endswith((".D", "dt_bias")) and family != "qwen3_next":
        return array.reshape(-1, 1) if name.endswith(".D") else array
    if "mamba.norm" in name or "mixer.norm.weight" in name:
        return array.reshape(getattr(config, "mamba_n_groups", getattr(config, "n_groups", 1)), -1)
    return array
