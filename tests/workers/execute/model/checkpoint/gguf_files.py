"""Tiny models in GGUF files, written as llama.cpp's converter does: its names, its layout, its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

from tests.tiny import LLAMA_LIKE, SPECIAL_TOKENS, VOCAB_SIZE, build_tiny_model
from tests.workers.execute.model.checkpoint import gguf_hybrids

pytest.importorskip("gguf")

import gguf
from gguf import GGMLQuantizationType as Type

mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
if not hasattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS"):
    pytest.skip("GGUF files need transformers 5.20", allow_module_level=True)

__all__ = ["FAMILIES", "TEMPLATE", "TOKENS", "Arrays", "Type", "build", "make_gguf", "random_blocks", "tensors_of"]

TEMPLATE = "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
# A token for each byte and a few merges, as many as the models have ids.
TOKENS = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "<|im_start|>", "<|im_end|>"]
TOKENS += [f"[PAD{number}]" for number in range(len(TOKENS), VOCAB_SIZE)]
SPLITS = {"qwen2": "qwen2", "qwen2moe": "qwen2", "qwen35": "qwen35", "qwen35moe": "qwen35", "lfm2": "lfm2"}
Arrays = dict[str, npt.NDArray[Any]]
# The architecture of a file, and of transformers' family what makes it a model of that architecture.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16}),
    "qwen2": ("qwen2", {key: value for key, value in LLAMA_LIKE.items() if key != "head_dim"}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 7.0}),
    "gemma3": ("gemma3_text", {}),
    "phi3": ("phi3", {"head_dim": 16}),
    "qwen3moe": (
        "qwen3_moe",
        {**LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen2moe": (
        "qwen2_moe",
        {
            **{key: value for key, value in LLAMA_LIKE.items() if key != "head_dim"},
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    **gguf_hybrids.FAMILIES,
}  # fmt: skip


def build(architecture: str, **overrides: Any) -> PreTrainedModel:
    family, options = FAMILIES[architecture]
    return build_tiny_model(family, **{**options, **overrides})


def make_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    type_: Type = Type.F32,
    pieces: bool = False,
    settings: Mapping[str, Any] = {},
    tensors: Callable[[Arrays], Arrays] = lambda tensors: tensors,
    part: tuple[int, int] | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Write a random model to ``path``, and return it. Matrices are of type ``type_``.

    With ``pieces`` its tokenizer is SentencePiece's, else a byte-level one. ``settings`` are added or replace others;
    None removes one. ``part`` (number, count) writes one of several files: the settings are in number 0.
    """
    model = build(architecture, **overrides)
    writer = gguf.GGUFWriter(path, architecture)
    arrays = tensors(as_gguf(model, architecture))
    if part is not None:
        number, count = part
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(arrays))
        arrays = dict(list(arrays.items())[number::count])
    if part is None or part[0] == 0:
        vocabulary = _pieces() if pieces else _byte_level(architecture)
        stated = {**_settings(model, architecture), **vocabulary, **settings}
        for key, value in stated.items():
            if value is not None:
                _add(writer, key.replace("ARCH", architecture), value)
    for name, array in arrays.items():
        kind = type_ if array.ndim > 1 and array.shape[-1] % 32 == 0 else Type.F32
        if array.dtype != np.float32:  # blocks, or what no quantisation gives
            writer.add_tensor(name, array, raw_dtype=type_ if array.dtype == np.uint8 else None)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def as_gguf(model: PreTrainedModel, architecture: str) -> Arrays:
    """The weights of a model by llama.cpp's names, in its layout."""
    config: Any = model.config
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found: Arrays = {}
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and (".q_proj" in name or ".k_proj" in name):
            heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
        if architecture.startswith("gemma") and "norm" in name:
            array = array + 1
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            for part, half in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                found[f"blk.{layer}.ffn_{part}_exps.weight"] = np.ascontiguousarray(half)
            continue
        if name.endswith("experts.down_proj"):
            name += ".weight"
        if name.endswith("shared_expert_gate.weight"):
            array = array[0]  # as llama-quantize leaves it
        if architecture in gguf_hybrids.FAMILIES:
            array = gguf_hybrids.converted(name, array, config)
        base, _, suffix = name.rpartition(".")
        own_name = gguf_hybrids.own_name(name) or f"{names.get_name(base)}.{suffix}"
        found[own_name] = np.ascontiguousarray(array)
    return found


def random_blocks(shape: tuple[int, ...], type_: Type) -> npt.NDArray[np.uint8]:
    """Blocks of a type that the package cannot make: random bits, with scales that keep the numbers small."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[type_]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // block, num_bytes), dtype=np.uint8)
    scales = random.uniform(1e-4, 1e-3, (*blocks.shape[:-1], 2)).astype(np.float16)
    blocks[..., :4] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _settings(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    config: Any = model.config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    heads = config.num_attention_heads
    stated = {
        "general.type": "model",
        "general.name": "tiny",
        "ARCH.vocab_size": config.vocab_size,
        "ARCH.context_length": config.max_position_embeddings,
        "ARCH.embedding_length": config.hidden_size,
        "ARCH.block_count": config.num_hidden_layers,
        "ARCH.feed_forward_length": getattr(config, "intermediate_size", None),
        "ARCH.attention.head_count": heads,
        "ARCH.attention.head_count_kv": config.num_key_value_heads,
        "ARCH.attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", 0)),
        "ARCH.rope.freq_base": float(rope["rope_theta"]),
    }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if architecture not in ("qwen2", "qwen2moe"):
        stated |= {"ARCH.attention.key_length": head_dim, "ARCH.attention.value_length": head_dim}
    if architecture in ("llama", "phi3"):
        stated["ARCH.rope.dimension_count"] = head_dim
    if architecture.startswith("gemma"):
        stated["ARCH.attention.sliding_window"] = config.sliding_window
    if architecture == "gemma2":
        stated["ARCH.attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        stated["ARCH.final_logit_softcapping"] = float(config.final_logit_softcapping)
    if architecture.endswith("moe"):
        stated["ARCH.expert_count"] = config.num_experts
        stated["ARCH.expert_used_count"] = config.num_experts_per_tok
        stated["ARCH.expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture in gguf_hybrids.FAMILIES:
        stated |= gguf_hybrids.settings(config)
    if architecture in ("qwen2moe", "qwen35moe"):
        stated["ARCH.expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return stated


def _byte_level(architecture: str) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": SPLITS.get(architecture, "llama-bpe"),
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 258 + [3, 3] + [5] * (VOCAB_SIZE - 263),
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }


def _pieces() -> dict[str, Any]:
    """SentencePiece's BPE with tokens for bytes it has no piece for. With all bytes it needs a larger vocabulary."""
    letters = ["▁", *"abcdehlort", "th", "the", "▁the", "he", "ll"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    types = [2, 3, 3] + [6] * 256 + [1] * len(letters)
    scores = [0.0] * 259 + [-float(number) for number in range(len(letters))]
    assert len(tokens) > VOCAB_SIZE
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint directory, by their names in its files."""
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
