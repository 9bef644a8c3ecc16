"""A copy of a checkpoint with its channels in another order, which computes the same.

A checkpoint that was made from a file in four bits still has the groups of that file, and int4 finds them again. In the
copy nothing is left of them: it says what int4 costs weights that were never in four bits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def shuffled(folder: Path, target: Path) -> Path:
    """Copy a checkpoint of a model like Llama to ``target``, with its hidden channels, the inner channels of each MLP,
    and the channels of each head's values in another order. Queries and keys stay as they are: positions rotate pairs
    of their channels.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(config["hidden_size"], generator=generator)
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "norm.weight")):
            tensors[name] = tensor[..., order]
    for layer in range(config["num_hidden_layers"]):
        _shuffle_layer(tensors, f"model.layers.{layer}", config, order, generator)
    target.mkdir(parents=True)
    for file in folder.glob("*.j*"):  # not the index of the tensors, which are in one file now
        if not file.name.endswith(".index.json"):
            shutil.copy(file, target)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _shuffle_layer(
    tensors: dict[str, torch.Tensor],
    layer: str,
    config: dict[str, int],
    order: torch.Tensor,
    generator: torch.Generator,
) -> None:
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    inner = torch.randperm(config["intermediate_size"], generator=generator)
    of_heads = [torch.randperm(size, generator=generator) for _ in range(kv_heads)]
    values = torch.cat([head * size + own for head, own in enumerate(of_heads)])
    attended = torch.cat([head * size + of_heads[head * kv_heads // heads] for head in range(heads)])
    for module, rows, columns in (
        ("self_attn.q_proj", None, order),
        ("self_attn.k_proj", None, order),
        ("self_attn.v_proj", values, order),
        ("self_attn.o_proj", order, attended),
        ("mlp.gate_proj", inner, order),
        ("mlp.up_proj", inner, order),
        ("mlp.down_proj", order, inner),
    ):
        name = f"{layer}.{module}.weight"
        tensors[name] = tensors[name][:, columns] if rows is None else tensors[name][rows][:, columns]
