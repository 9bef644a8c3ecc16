"""Random LoRA adapters of tiny checkpoints, in PEFT's format, and the equivalent merged weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path, checkpoint: Path, *, targets: Sequence[str] = ALL_LINEAR, rank: int = 8, seed: int = 0, **config: Any
) -> Path:
    """An adapter of the modules with these names, whose updates have a fifth of the weights' magnitude."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module.rpartition(".")[2] in targets:
                shape = file.get_slice(name).get_shape()
                outputs, inputs = shape[::-1] if _is_transposed(checkpoint) else shape
                spread = float(file.get_tensor(name).float().std()) or 1.0
                for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    values = torch.randn(shape, generator=generator) * (0.2 * spread / rank**0.5) ** 0.5
                    tensors[f"base_model.model.{module}.lora_{side}.weight"] = values
    write_adapter(folder, tensors, r=rank, lora_alpha=rank, target_modules=list(targets), **config)
    return folder


def _is_transposed(checkpoint: Path) -> bool:
    """Whether its matrices are stored as [inputs, outputs]; those of adapters never are."""
    return bool(json.loads((checkpoint / "config.json").read_text())["model_type"] == "gpt2")


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def make_nominal_adapter(folder: Path, content: bytes = b"") -> Path:
    """An adapter without meaningful weights, for the hash LM."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def merge(checkpoint: Path, adapter: Path, folder: Path, *, scale: float = 1.0) -> Path:
    """The checkpoint with the adapter merged into its weights."""
    weights, additions = load_file(checkpoint / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in additions:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            product = additions[f"{module}.lora_B.weight"].double() @ additions[name].double()
            key = module.removeprefix("base_model.model.") + ".weight"
            product = product.T if _is_transposed(checkpoint) else product
            weights[key] = (weights[key].double() + scale * product).to(weights[key].dtype)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder
