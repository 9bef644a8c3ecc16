"""Attributes of configs that are not a setting of a GGUF file by another name, family by family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ......protocol.errors import ConfigError
from .architecture import Attributes

if TYPE_CHECKING:
    from .file import GgufFile

OF_LATENTS = frozenset(
    {
        "attention.key_length", "attention.value_length", "attention.key_length_mla", "attention.value_length_mla",
        "expert_gating_func", "rope.dimension_count", "rope.scaling.yarn_log_multiplier",
    }
)  # fmt: skip
OF_MINISTRAL3 = frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"})
_SIGMOID = 2  # expert_gating_func
_LAYER_NORM_EPS = 1e-5
# Experts, and in how many groups they are and from how many a token chooses, of models of whose files many do not
# tell: DeepSeek's V2 and V3.
_GROUPS = {160: (8, 3), 256: (8, 4)}


def refuse(file: GgufFile, key: str) -> ConfigError:
    value = file.of_model(key)
    return ConfigError(
        f"{file.path} states {file.architecture}.{key} = {value!r:.50}, which is not supported", param="model"
    )


def window_layers(file: GgufFile, *, every: int) -> list[str]:
    """The kind of each layer: as stated, or all but one in so many have a window."""
    pattern, count = file.of_model("attention.sliding_window_pattern"), num_layers(file)
    if not isinstance(pattern, list):
        every = pattern or every
        pattern = [(layer + 1) % every != 0 for layer in range(count)]
    return ["sliding_attention" if has_window else "full_attention" for has_window in pattern[:count]]


def num_layers(file: GgufFile) -> int:
    return int(file.of_model("block_count")) - int(file.of_model("nextn_predict_layers") or 0)


def kinds_of_layers(file: GgufFile, kinds: Mapping[str, str]) -> list[str]:
    """The kind of each layer, by the first tensor in ``kinds`` that it has."""

    def kind(layer: int) -> str:
        for name, found in kinds.items():
            if f"blk.{layer}.{name}" in file.tensors:
                return found
        raise ConfigError(f"layer {layer} of {file.path} is of no known kind", param="model")

    return [kind(layer) for layer in range(num_layers(file))]


def windows(*, every: int) -> Callable[[GgufFile, Attributes], None]:
    def complete(file: GgufFile, values: Attributes) -> None:
        values["layer_types"] = window_layers(file, every=every)

    return complete


def exaone4(file: GgufFile, values: Attributes) -> None:
    if file.of_model("attention.sliding_window"):
        values["layer_types"] = window_layers(file, every=4)
    else:
        values |= {"sliding_window": None, "layer_types": ["full_attention"] * num_layers(file)}


def olmo3(file: GgufFile, values: Attributes) -> None:
    """Layers with a window have frequencies of their own, which are never scaled for long contexts."""
    values["layer_types"] = window_layers(file, every=4)
    plain = values["rope_parameters"]
    values["rope_parameters"] = {"full_attention": plain, "sliding_attention": dict(plain)}


def granite(file: GgufFile, values: Attributes) -> None:
    """Scores are divided as usual unless stated.

    Raises:
        ConfigError: the model does not turn queries and keys, which its family always does.
    """
    if file.of_model("rope.scaling.finetuned") is False:  # so llama.cpp tells that there are no rotary embeddings
        raise refuse(file, "rope.scaling.finetuned")
    add_score_divisor(values)


def gpt_oss(file: GgufFile, values: Attributes) -> None:
    values["layer_types"] = window_layers(file, every=2)
    values["rope_parameters"]["truncate"] = False


def add_score_divisor(values: Attributes) -> None:
    usual = (values["hidden_size"] / values["num_attention_heads"]) ** -0.5
    values.setdefault("attention_multiplier", usual)


def sigmoid_experts(file: GgufFile, values: Attributes) -> None:
    """
    Raises:
        ConfigError: experts are chosen by another function than the family's.
    """
    if file.of_model("expert_gating_func") not in (None, 0, _SIGMOID):
        raise refuse(file, "expert_gating_func")


def ernie_experts(file: GgufFile, values: Attributes) -> None:
    values["moe_layer_end_index"] = num_layers(file) - 1


def minicpm3(file: GgufFile, values: Attributes) -> None:
    """Sizes of queries, keys and values before they are mapped to latents; no setting has that of values."""
    turned, (num_attended, *_) = (
        int(file.of_model("rope.dimension_count")),
        file.tensors["blk.0.attn_output.weight"].shape,
    )
    values |= {
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": int(file.of_model("attention.key_length")) - turned,
        "v_head_dim": int(num_attended) // values["num_attention_heads"],
    }


def ministral3(file: GgufFile, values: Attributes) -> None:
    values["rope_parameters"] |= {
        "llama_4_scaling_beta": file.of_model("attention.temperature_scale"),
        "mscale": 1.0,
        "mscale_all_dim": file.of_model("rope.scaling.yarn_log_multiplier") or 0.0,
    }


def olmo(file: GgufFile, values: Attributes) -> None:
    """
    Raises:
        ConfigError: its norms have another epsilon than the family's.
    """
    stated = file.of_model("attention.layer_norm_epsilon")
    if abs(stated - _LAYER_NORM_EPS) > 1e-8:
        raise refuse(file, "attention.layer_norm_epsilon")


def falcon(file: GgufFile, values: Attributes) -> None:
    """Models with a single key head are of the first generation; later ones have one norm per layer, or two."""
    has_many = file.of_model("attention.head_count_kv") != 1
    values |= {"new_decoder_architecture": has_many, "multi_query": True, "parallel_attn": True, "alibi": False}
    if has_many:
        values["num_ln_in_parallel_attn"] = 2 if "blk.0.attn_norm_2.weight" in file.tensors else 1


def family_with_latents(file: GgufFile) -> str:
    """The family of a model with latents, which share one architecture in files. DeepSeek's V2 chooses experts by a
    softmax, without biases; GLM-4.7-Flash has the tokenizer of GLM-4.
    """
    if not file.of_model("expert_count"):
        return "youtu"
    if file.value("tokenizer.ggml.pre") == "glm4":
        return "glm4_moe_lite"
    has_sigmoid = file.of_model("expert_gating_func") == _SIGMOID
    has_biases = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    return "deepseek_v3" if has_sigmoid or has_biases else "deepseek_v2"


def latents(file: GgufFile, values: Attributes) -> None:
    """Sizes of queries, keys and values before they are mapped to latents, and the groups of experts."""
    turned = int(file.of_model("rope.dimension_count"))
    query = file.of_model("attention.key_length_mla") or file.of_model("attention.key_length")
    values |= {
        "num_key_value_heads": values["num_attention_heads"],
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": int(query) - turned,
        "v_head_dim": int(file.of_model("attention.value_length_mla") or file.of_model("attention.value_length")),
    }
    stretch = file.of_model("rope.scaling.yarn_log_multiplier")
    if stretch:  # a tenth of it, for historical reasons
        values["rope_parameters"] |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * stretch, 4))
    if values.get("n_routed_experts"):
        _group_experts(file, values)


def _group_experts(file: GgufFile, values: Attributes) -> None:
    num_groups, num_chosen = _GROUPS.get(values["n_routed_experts"], (1, 1))
    values["n_group"] = values.get("n_group") or num_groups
    values["topk_group"] = values.get("topk_group") or num_chosen
    values.setdefault("norm_topk_prob", False)
    values["routed_scaling_factor"] = values.get("routed_scaling_factor") or 1.0
    family = family_with_latents(file)
    if family == "deepseek_v2":
        values["topk_method"] = "group_limited_greedy" if values["n_group"] > 1 else "greedy"
    if family == "glm4_moe_lite":
        first = values.pop("first_k_dense_replace", 0)
        count = num_layers(file)
        values["mlp_layer_types"] = ["dense"] * first + ["sparse"] * (count - first)
