"""Random checkpoints of real shapes, made once and kept: speed depends on shapes, not on what a model has learned."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

RANK = 16  # of adapters
SHAPES: dict[str, dict[str, Any]] = {
    "llama-6m": {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 704,
        "vocab_size": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
    },
    "qwen3-moe-0.5b": {  # of which a token reads 0.1
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 3072,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "vocab_size": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
    },
    "gpt-oss-0.6b": {  # of which a token reads 0.13
        "model_type": "gpt_oss",
        "hidden_size": 960,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 960,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 960,
        "sliding_window": 128,
        "attention_bias": True,
        "vocab_size": 32768,
        "max_position_embeddings": 8192,
    },
    "gemma3-270m": {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 2048,
        "vocab_size": 262144,
        "sliding_window": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
    },
    "qwen3.5-0.8b": {  # every fourth layer attends
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 3584,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
    },
}
_WEIGHT_BYTES = {
    "int8": (1.0, 1.0), "q8_0": (1.0, 1.0), "int4": (9 / 16, 1.0), "q4_0": (9 / 16, 1.0), "mxfp4": (9 / 16, 1.0),
}  # fmt: skip
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])  # with 4-bit weights
_COMMON = {
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attention_bias": False,
}


def make_model(name: str, *, has_mxfp4: bool = False) -> Path:
    """The directory of a bfloat16 checkpoint of that shape with random weights, made if it does not exist; for gpt-oss
    also with experts in MXFP4.
    """
    folder = Path(os.environ.get("TRIPTYCH_BENCH_DIR") or Path.home() / ".cache" / "triptych" / "bench") / name
    make_checkpoint(folder, SHAPES[name])
    return _in_mxfp4(folder, folder.with_name(f"{name}-mxfp4")) if has_mxfp4 else folder


def make_checkpoint(folder: Path, shape: dict[str, Any], *, device: str = "cpu") -> Path:
    """Make the same in ``folder``; ``device`` draws the random numbers, and each device has its own."""
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**_COMMON, **shape}))
        _make_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})
        )
        _write_random_weights(folder / "model.safetensors.part", shape, device)
        (folder / "model.safetensors.part").rename(folder / "model.safetensors")
    return folder


def _in_mxfp4(checkpoint: Path, folder: Path) -> Path:
    """In ``folder``, the checkpoint with its experts in MXFP4, made if it does not exist."""
    if not (folder / "model.safetensors").exists():
        shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((checkpoint / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
        tensors = load_file(checkpoint / "model.safetensors")
        for name in [name for name, tensor in tensors.items() if tensor.dim() == 3]:
            numbers, scales = zip(*map(_mxfp4, tensors.pop(name)), strict=True)
            tensors |= {f"{name}_blocks": torch.stack(numbers), f"{name}_scales": torch.stack(scales)}
        save_file(tensors, folder / "model.safetensors.part", metadata={"format": "pt"})
        (folder / "model.safetensors.part").rename(folder / "model.safetensors")
    return folder


def _mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [outputs, groups, 16] and scales [outputs, groups] of weights [inputs, outputs]."""
    groups = weights.T.float().reshape(weights.shape[1], -1, 32)
    exponents = torch.frexp(groups.abs().amax(dim=2, keepdim=True) / 6).exponent  # the least power that clips nothing
    borders = (_E2M1[:7] + _E2M1[1:8]) / 2
    magnitudes = torch.bucketize(torch.ldexp(groups, -exponents).abs().contiguous(), borders)
    numbers = (magnitudes + 8 * (groups < 0)).to(torch.uint8)
    return numbers[..., ::2] + 16 * numbers[..., 1::2], (exponents[..., 0] + 127).to(torch.uint8)


def make_adapter(folder: Path, checkpoint: Path, seed: int) -> Path:
    """A random LoRA adapter of all linear layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118, it is no mapping
            if name.endswith("_proj.weight"):
                outputs, inputs = file.get_slice(name).get_shape()
                for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                    values = torch.randn(shape, generator=generator) * 0.1 * inputs**-0.25
                    key = f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight"
                    tensors[key] = values.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    return folder


def weight_bytes(form: str) -> tuple[float, float]:
    """Bytes of a weight of a layer, and of the head."""
    return _WEIGHT_BYTES.get(form, (2.0, 2.0))


def keeps_states(shape: dict[str, Any]) -> bool:
    return "linear_num_value_heads" in shape


def num_weights(shape: dict[str, Any]) -> tuple[int, int]:
    """Number of weights of all layers' matrices that a token needs, and of the head."""
    hidden, size = shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    inner = shape["intermediate_size"]
    if "num_experts" in shape:
        inner = shape["num_experts_per_tok"] * shape["moe_intermediate_size"]
    count, attending = shape["num_hidden_layers"], hidden * size * (2 * heads + 2 * kv_heads)
    mixers = count * attending
    if keeps_states(shape):  # every fourth layer attends, with gates
        keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
        values = shape["linear_num_value_heads"] * shape["linear_value_head_dim"]
        recalling = hidden * (2 * keys + 3 * values)
        mixers = count // 4 * (attending + hidden * size * heads) + (count - count // 4) * recalling
    return mixers + count * 3 * hidden * inner, shape["vocab_size"] * hidden


def num_step_weights(shape: dict[str, Any], num_tokens: int) -> float:
    """Number of weights of all layers' matrices that a step with that many tokens reads, with as many experts as
    expected from random choices.
    """
    layers, _ = num_weights(shape)
    if "num_experts" not in shape:
        return layers
    others, _ = num_weights({**shape, "num_experts_per_tok": 0})
    num_experts = shape["num_experts"]
    chosen: float = num_experts * (1 - (1 - shape["num_experts_per_tok"] / num_experts) ** num_tokens)
    of_expert: int = 3 * shape["hidden_size"] * shape["moe_intermediate_size"]
    return float(others + shape["num_hidden_layers"] * chosen * of_expert)


def _write_random_weights(file: Path, shape: dict[str, Any], device: str) -> None:
    """Draw each tensor straight into its place in the file: 8B weights in memory as well would take seconds more."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in _stored_sizes(shape):
        start, end = end, end + 2 * prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
    data = torch.from_file(str(file), shared=True, size=8 + len(text) + end, dtype=torch.uint8)[8 + len(text) :]
    for name, values in _random_weights(shape, device):
        place = data[slice(*header[name]["data_offsets"])]
        place.view(torch.bfloat16).view(values.shape).copy_(values)


def _random_weights(shape: dict[str, Any], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Embeddings are small compared with the layers' outputs, so that the tied head does not repeat the input."""
    generator = torch.Generator(device).manual_seed(0)
    for name, size in _stored_sizes(shape):
        if len(size) == 1 or name.endswith("bias"):  # equal values would make all tokens alike
            yield name, torch.full(size, float(not name.endswith("bias")), dtype=torch.bfloat16)
            continue
        values = torch.randn(size, generator=generator, device=device)
        inputs = size[1] if len(size) == 3 else size[-1]
        std = 0.02 if name == "model.embed_tokens.weight" else inputs**-0.5
        yield name, values.mul_(std).to(torch.bfloat16)  # rounded before it is copied to the host


def _stored_sizes(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors as in checkpoints: each expert separately, which transformers holds as one tensor."""
    for name, size in _parameter_sizes(shape).items():
        # Checkpoints of gpt_oss have one tensor too, and the weights of a convolution have three axes.
        if len(size) < 3 or shape["model_type"] in ("gpt_oss", "qwen3_5_text"):
            yield name, size
            continue
        experts, _, kind = name.rpartition(".")
        parts = ["gate", "up"] if kind == "gate_up_proj" else ["down"]
        for number, part in product(range(size[0]), parts):
            yield f"{experts}.{number}.{part}_proj.weight", (size[1] // len(parts), size[2])


def _parameter_sizes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, which some callers avoid

    config = AutoConfig.for_model(**{**_COMMON, **shape})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _make_tokenizer() -> Tokenizer:
    """One token per byte: the benchmark uses token ids, the loader only needs a tokenizer."""
    vocabulary = {token: i for i, token in enumerate(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    return Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
