"""Checkpoints as the tools write them that quantise weights to four bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from tests.workers.execute.model.native.decoders import change_config, make_checkpoint

Array = npt.NDArray[Any]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "attention_bias": True, "mamba_expand": 1}
OWN_SIZES = {
    "youtu": {"head_dim": 16, "kv_lora_rank": 128, "q_lora_rank": 128},
    "qwen2_moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
}
GROUP = 128


def words(numbers: Array, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """[..., n / k] int32 of [..., n]: of each k, the number in column order[i] has the bits from 32 / k * i on."""
    parts = numbers.reshape(*numbers.shape[:-1], -1, len(order)).astype(np.uint32)
    packed = sum(parts[..., column] << np.uint32(32 // len(order) * place) for place, column in enumerate(order))
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))


def gptq(numbers: Array, scales: Array, zeros: Array) -> dict[str, torch.Tensor]:
    return {
        "qweight": words(numbers).T.contiguous(),
        "qzeros": words(zeros.T - 1),
        "scales": torch.from_numpy(scales.T.copy()).half(),
        "g_idx": torch.arange(numbers.shape[1], dtype=torch.int32) // GROUP,
    }


def gptq_v2(numbers: Array, scales: Array, zeros: Array) -> dict[str, torch.Tensor]:
    return {**gptq(numbers, scales, zeros), "qzeros": words(zeros.T)}


def awq(numbers: Array, scales: Array, zeros: Array) -> dict[str, torch.Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(numbers.T, order),
        "qzeros": words(zeros.T, order),
        "scales": torch.from_numpy(scales.T.copy()).half(),
    }


def pack_quantized(numbers: Array, scales: Array, zeros: Array) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": words(numbers),
        "weight_scale": torch.from_numpy(scales).bfloat16(),
        "weight_zero_point": words(zeros.T).T.contiguous(),
        "weight_shape": torch.tensor(numbers.shape),
    }


def without_order(layout: Layout) -> Layout:
    """As auto-round writes it."""
    return lambda *parts: {name: part for name, part in layout(*parts).items() if name != "g_idx"}


Layout = Callable[[Array, Array, Array], dict[str, torch.Tensor]]
SCHEME = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "data_type": "int", "act_bits": 16}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "compressed-tensors": (
        pack_quantized,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": SCHEME}},
    ),
    "auto-round": (without_order(gptq_v2), {**AUTO_ROUND, "packing_format": "auto_round"}),
    "auto-round for gptqmodel": (gptq_v2, {**AUTO_ROUND, "packing_format": "auto_round:gptqmodel"}),
    "auto-round as gptq": (without_order(gptq), {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}),
    "auto-round as awq": (awq, {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}),
}


def make_pair(family: str, layout: str, folder: Path, **settings: Any) -> tuple[Path, Path]:
    """A checkpoint in that layout, and a plain one with the same weights, which include both ends of each 32 inputs."""
    plain = make_checkpoint(family, folder / "plain", **SIZES | OWN_SIZES.get(family, {}))
    shutil.copytree(plain, folder / "stored")
    pack, config = LAYOUTS[layout]
    tensors, stored, rng = load_file(plain / "model.safetensors"), {}, np.random.default_rng(0)
    for name, tensor in list(tensors.items()):
        if ".layers." not in name or tensor.dim() != 2 or name.endswith("gate.weight"):  # of experts
            stored[name] = tensor.clone()
            continue
        num_outputs, num_inputs = tensor.shape
        shape = (num_outputs, num_inputs // GROUP)
        numbers = rng.integers(0, 16, tensor.shape)
        numbers[:, ::32], numbers[:, 1::32] = 0, 15
        # Few bits, so that products with zeros are exact, and so are all weights in float32.
        scales = rng.integers(8, 16, shape).astype(np.float32) / 2**11
        zeros = rng.integers(1, 16, shape)
        worth, zero = np.repeat(scales, GROUP, axis=1), np.repeat(zeros, GROUP, axis=1)
        tensors[name] = torch.from_numpy((numbers - zero) * worth).float()
        parts = pack(numbers, scales, zeros)
        stored |= {f"{name.removesuffix('weight')}{part}": values for part, values in parts.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "stored" / "model.safetensors", {"format": "pt"})
    change_config(folder / "stored", quantization_config={**config, **settings}, dtype="float16")
    return folder / "stored", plain
