"""Checkpoints in FP8 as published by several tools, each with a plain one of the same weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.workers.execute.model.native.decoders import change_config, changed_tensors, make_checkpoint

FP8 = torch.float8_e4m3fn
BLOCK = 128
ODD: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 200, "head_dim": 16}  # not multiples of a block
Tensors = dict[str, torch.Tensor]


def in_fp8(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 numbers and float32 scales [ceil(outputs / rows), ceil(inputs / columns)], block by block."""
    outputs, inputs = weight.shape
    numbers, scales = torch.empty(weight.shape, dtype=FP8), torch.empty(-(-outputs // rows), -(-inputs // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[place].abs().max() / 448
            numbers[place] = (weight[place] / scales[i, j]).to(FP8)
    return numbers, scales


def dequantised(numbers: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """By definition, in float64 [outputs, inputs]: each number times the scale of its block."""
    row, column = (torch.arange(size) // step for size, step in zip(numbers.shape, (rows, columns), strict=True))
    return numbers.double() * scales.double()[row][:, column]


class Form(NamedTuple):
    """How a tool stores FP8."""

    settings: dict[str, Any]  # quantization_config
    rows: int  # of a block
    columns: int
    scale: str  # the name of a weight's scale
    shape: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales  # as it is stored
    others: dict[str, torch.Tensor] = {}  # other tensors of a module, which are not needed


ALL = 1 << 20  # rows or columns


def scheme(strategy: str, **weights: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors."""
    kind = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": kind, "input_activations": {"num_bits": 8, "type": "float"}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


def one(scales: torch.Tensor) -> torch.Tensor:
    return scales.reshape(())


STATIC = {"activation_scale": torch.tensor(0.02)}
FORMS = {
    "blocks": Form(
        {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        },
        BLOCK, BLOCK, "weight_scale_inv",
    ),
    "tensors": Form(
        {
            "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
            "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        },
        ALL, ALL, "weight_scale_inv", one, STATIC,
    ),
    "autofp8": Form(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        ALL, ALL, "weight_scale", one, {"input_scale": torch.tensor([0.02])},
    ),
    "channels": Form(scheme("channel"), 1, ALL, "weight_scale", torch.Tensor.bfloat16),
    "compressed tensors": Form(
        {**scheme("tensor"), "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
        ALL, ALL, "weight_scale", lambda scales: scales.reshape(1),
        {"input_scale": torch.tensor([0.02]), "k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.5])},
    ),
    "compressed blocks": Form(
        scheme("block", block_structure=[BLOCK, BLOCK]), BLOCK, BLOCK, "weight_scale"
    ),
    "fbgemm": Form(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        1, ALL, "weight_scale",
    ),
    "modelopt": Form(
        {
            "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.33.0"},
        },
        ALL, ALL, "weight_scale", one, {"input_scale": torch.tensor(0.02)},
    ),
}  # fmt: skip
_LINEAR = re.compile(r".*layers\.\d+\.(self_attn|mlp|block_sparse_moe)\.(.+\.)?(\w+_proj|w\d)\.weight")


def make_fp8_pair(family: str, form: str, folder: Path, **sizes: Any) -> tuple[Path, Path]:
    """A checkpoint in that form, and a plain one in float32 with the same weights. Its head and embedding are
    unchanged.
    """
    plain = make_checkpoint(family, folder / "plain", **sizes)
    return store_in_fp8(plain, form, folder / "stored"), plain


def store_in_fp8(plain: Path, form: str, stored: Path) -> Path:
    """Store the plain checkpoint in that form; its weights become the dequantised ones. A vision part is unchanged."""
    shutil.copytree(plain, stored)
    kind = FORMS[form]
    with changed_tensors(plain) as tensors, changed_tensors(stored) as parts:
        for name in [name for name in tensors if _LINEAR.fullmatch(name) and "vision" not in name]:
            numbers, scales = in_fp8(tensors[name], kind.rows, kind.columns)
            module, as_stored = name.removesuffix("weight"), kind.shape(scales)
            parts |= {name: numbers, module + kind.scale: as_stored}
            parts |= {module + other: value.clone() for other, value in kind.others.items()}
            rounded = as_stored.reshape(scales.shape)
            tensors[name] = dequantised(numbers, rounded, kind.rows, kind.columns).float()
    change_config(stored, quantization_config=kind.settings)
    return stored
