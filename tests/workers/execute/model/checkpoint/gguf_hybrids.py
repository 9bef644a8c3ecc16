"""What llama.cpp's converter does to models with recurrent layers besides renaming."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.tiny import RECURRENT

Array = npt.NDArray[Any]
SIZES: dict[str, Any] = {  # that the compiled kernels have
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"},
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {}),
    "qwen35": ("qwen3_5_text", SIZES),
    "qwen35moe": ("qwen3_5_moe_text", {**RECURRENT["qwen3_5_text"], **SIZES, **EXPERTS}),
}
_OTHER_NAMES = {"linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a"}


def own_name(name: str) -> str | None:
    """The name of a tensor that the package has no name for."""
    _, _, layer, part = [*name.split(".", 3), "", ""][:4]
    return f"blk.{layer}.{_OTHER_NAMES[part]}" if part in _OTHER_NAMES else None


def converted(name: str, array: Array, config: Any) -> Array:
    if name.endswith("conv.weight") or "conv1d" in name:
        array = array[:, 0]
    if "qwen" not in config.model_type:
        return array
    if "norm" in name and "linear_attn" not in name:
        return array + 1
    heads = config.linear_num_key_heads
    shape = heads, config.linear_num_value_heads // heads, config.linear_value_head_dim
    keys = 2 * config.linear_key_head_dim * heads
    match name.split("linear_attn.")[-1]:
        case "A_log":
            return _tiled(-np.exp(array), (*shape[:2], 1))
        case "dt_bias" | "in_proj_a.weight" | "in_proj_b.weight":
            return _tiled(array, (*shape[:2], 1))
        case "in_proj_z.weight":
            return _tiled(array, shape)
        case "in_proj_qkv.weight" | "conv1d.weight":
            return np.concatenate([array[:keys], _tiled(array[keys:], shape)])
        case "out_proj.weight":
            return _tiled(array.T, shape).T
    return array


def _tiled(array: Array, shape: tuple[int, int, int]) -> Array:
    """Rows [key heads, value heads of each, size] -> [value heads of each, key heads, size]."""
    return array.reshape(*shape, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)


def settings(config: Any) -> dict[str, Any]:
    if config.model_type == "lfm2":
        attends = [kind == "full_attention" for kind in config.layer_types]
        return {
            "ARCH.attention.head_count_kv": [config.num_key_value_heads * each for each in attends],
            "ARCH.attention.layer_norm_rms_epsilon": float(config.norm_eps),
            "ARCH.feed_forward_length": 256,  # as it was adjusted
            "ARCH.shortconv.l_cache": config.conv_L_cache,
        }
    return {
        "ARCH.attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "ARCH.full_attention_interval": 4,
        "ARCH.rope.dimension_count": 8,
        "ARCH.rope.dimension_sections": [2, 1, 1, 0],
        "ARCH.ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ARCH.ssm.state_size": config.linear_key_head_dim,
        "ARCH.ssm.group_count": config.linear_num_key_heads,
        "ARCH.ssm.time_step_rank": config.linear_num_value_heads,
        "ARCH.ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }
