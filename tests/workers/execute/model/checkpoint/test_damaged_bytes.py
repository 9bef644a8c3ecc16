"""Readers of weights refuse damaged bytes with an error that says so, in bounded time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.fuzz.fuzz import fuzz
from tests.fuzz.targets import Target
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.model.checkpoint.find import check_weights
from triptych.workers.execute.model.checkpoint.stored_weights import open_for_modules, open_tensors
from triptych.workers.execute.model.spec.decoder import Unsupported

NUM_INPUTS = 400
PACKED = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": False}
ROUNDED = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 4], "symmetric": True}


def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)


INT32, FP8 = torch.int32, torch.float8_e4m3fn
KINDS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "plain": ({"model_type": "llama"}, {"a.weight": torch.ones(2, 4), "b.bias": torch.ones(2)}),
    "stacked": (
        {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
        {
            "a.experts.gate_up_proj_blocks": zeros(torch.uint8, 2, 4, 1, 16),
            "a.experts.gate_up_proj_scales": zeros(torch.uint8, 2, 4, 1),
            "a.experts.down_proj_bias": torch.ones(2, 4),
        },
    ),
    "gptq": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"a": {}}}},
        {
            "a.qweight": zeros(INT32, 4, 8), "a.qzeros": zeros(INT32, 1, 1), "a.scales": torch.ones(1, 8),
            "a.g_idx": zeros(INT32, 32),
        },
    ),
    "packed": (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {"a": {"weights": PACKED}, "b": {"weights": PACKED}},
            },
        },
        {
            "a.weight_packed": zeros(INT32, 8, 4), "a.weight_scale": torch.ones(8, 1),
            "a.weight_zero_point": zeros(INT32, 1, 1), "a.weight_shape": torch.tensor([8, 32]),
        },
    ),
    "blocks of fp8": (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors", "format": "float-quantized",
                "config_groups": {"a": {"weights": ROUNDED}},
            },
        },
        {"a.weight": zeros(FP8, 8, 8), "a.weight_scale": torch.ones(2, 2), "a.input_scale": torch.ones(1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_weights_or_settings_are_refused(kind: str, tmp_path: Path) -> None:
    """Of the file with the weights its header most of all, which is most of it; of the config what follows its end."""
    config, tensors = KINDS[kind]

    def read(damaged: bytes) -> None:
        settings, _, weights = damaged.partition(b"\n")
        try:
            is_config = isinstance(json.loads(settings), dict)  # which others have read before
        except (ValueError, RecursionError):
            return
        if not is_config:
            return
        (tmp_path / "config.json").write_bytes(settings)
        (tmp_path / "model.safetensors").write_bytes(weights)
        check_weights(tmp_path)
        for opened in (open_tensors(tmp_path), open_for_modules(tmp_path)):
            if opened is not None:
                opened.shapes()

    source = json.dumps(config).encode() + b"\n" + save(tensors)
    fuzz(Target((source,), read, (ConfigError, Unsupported)), kind, seed=0, count=NUM_INPUTS)
