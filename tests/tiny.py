"""Random checkpoints of real architectures, small enough to be made in a test, with a byte-level tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import Cache

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")  # ids 0, 1, 2; the 256 bytes follow
EOS_TOKEN_ID = 2
VOCAB_SIZE = 272  # of the models: a little more than the tokenizer's 259
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"

LLAMA_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "initializer_range": 0.2,  # ten times the usual, so that attention affects the logits
}
GPT_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "rotary_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "initializer_range": 0.2,
}

# Families that run on paged attention, each with its own feature.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE,  # norms on queries and keys
    "mistral": {**LLAMA_LIKE, "sliding_window": 8},
    "gemma2": {**LLAMA_LIKE, "sliding_window": 8, "attn_logit_softcapping": 5.0},  # every other layer slides
    "gemma3_text": {**LLAMA_LIKE, "sliding_window": 8, "num_hidden_layers": 6},  # every sixth layer is full
    "phi3": LLAMA_LIKE,  # one matrix for queries, keys and values
    "olmo2": LLAMA_LIKE,  # norms after attention
    "gpt2": GPT_LIKE,  # learned positions
}
# Families with layers that keep a state per sequence instead of keys and values, or beside them.
_GATED_DELTA = {
    **LLAMA_LIKE,
    "num_hidden_layers": 4,  # the last one attends
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_THIRD_ATTENDS = ["mamba", "mamba", "attention"]
needs_states = pytest.mark.skipif(
    not hasattr(Cache, "get_recurrent_state"), reason="this transformers passes recurrent layers their states otherwise"
)
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_next": {**_GATED_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "olmo_hybrid": _GATED_DELTA,
    "lfm2": {**LLAMA_LIKE, "layer_types": ["conv", "full_attention", "conv"]},  # short convolutions
    "falcon_h1": {  # each layer does both
        **LLAMA_LIKE, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
        "mamba_d_state": 16,
    },
    "bamba": {**LLAMA_LIKE, **_MAMBA, "attn_layer_indices": [2]},
    "granitemoehybrid": {
        **LLAMA_LIKE, **_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
        "layer_types": _THIRD_ATTENDS,
    },
    "nemotron_h": {  # and one layer in which tokens do not see each other
        **LLAMA_LIKE, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "num_hidden_layers": 4,
    },
    "jamba": {  # continues from a state one token at a time only, as mamba does
        **LLAMA_LIKE, "mamba_d_state": 8, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 3,
        "attn_layer_offset": 1,
    },
    "mamba": {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3, "initializer_range": 0.2},
    "mamba2": {  # no layer attends
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16,
        "n_groups": 2, "state_size": 16, "initializer_range": 0.2, "eos_token_id": EOS_TOKEN_ID,
    },
}  # fmt: skip
if "lara_mini" in CONFIG_MAPPING:  # transformers 5.24 has it
    RECURRENT["lara_mini"] = {  # and windows
        **{name: size for name, size in RECURRENT["qwen3_next"].items() if name != "intermediate_size"},
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        "sliding_window": 8, "shared_expert_intermediate_size": 48,
    }  # fmt: skip
if "zaya" in CONFIG_MAPPING:  # the queries, keys and values of each attention come from a module with a state
    RECURRENT["zaya"] = {**LLAMA_LIKE, "num_experts": 4, "moe_intermediate_size": 32}
# Families that would be wrong without an error, each for its own reason.
REFUSED: dict[str, dict[str, Any]] = {
    "falcon": {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    "bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "minimax": {**LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2},  # a state that no cache is asked for
    "llama4_text": {**LLAMA_LIKE, "attention_chunk_size": 4, "num_local_experts": 2},  # chunks in the mask
    "doge": LLAMA_LIKE,  # a mask made from the values
}


_NUM_KEPT = 100  # of under a megabyte each
_CHECKPOINTS: dict[str, tuple[dict[str, bytes], torch.Tensor]] = {}  # the files of each, and torch's random state after


def make_tiny_model(family: str, folder: Path, **overrides: Any) -> Path:
    """Save a random float32 checkpoint of the family with its tokenizer in ``folder``, and return ``folder``."""
    return saved(folder, partial(build_tiny_model, family, **overrides), f"tiny {family} {overrides}")


def saved(folder: Path, build: Callable[[], PreTrainedModel], key: str) -> Path:
    """Save a model with its tokenizer in ``folder``. What was built for the same key before is copied.

    Building takes ten times as long, and most tests want one of a few checkpoints. Random numbers drawn afterwards do
    not depend on whether it was built.
    """
    if key not in _CHECKPOINTS:
        if len(_CHECKPOINTS) == _NUM_KEPT:
            del _CHECKPOINTS[next(iter(_CHECKPOINTS))]
        model = build()
        with tempfile.TemporaryDirectory() as new:
            make_tiny_tokenizer().save_pretrained(new)
            model.save_pretrained(new)
            files = {file.name: file.read_bytes() for file in Path(new).iterdir()}
        _CHECKPOINTS[key] = files, torch.get_rng_state()
    files, random_state = _CHECKPOINTS[key]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    torch.set_rng_state(random_state)
    return folder


def prove(checkpoint: Path, dtype: str = "auto", *, kv_dtype: str = "auto", lora_modules: tuple[str, ...] = ()) -> None:
    """Run the self-test of a checkpoint's first start on the compiled kernels.

    A worker that starts afterwards does not need to import transformers, which is most of such a start; it is imported
    here.
    """
    from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
    from triptych.workers.execute.model.build import build_runner

    with tempfile.TemporaryDirectory() as run_dir:
        build_runner(
            ModelConfig(model=str(checkpoint), device="cpu", dtype=dtype, lora_modules=lora_modules),
            CacheConfig(num_pages=16, kv_dtype=kv_dtype), SchedulerConfig(),
            model_dir=checkpoint, run_dir=Path(run_dir),
        )  # fmt: skip


def build_tiny_model(family: str, **overrides: Any) -> PreTrainedModel:
    """The same model in memory: the same random weights at every call."""
    config = AutoConfig.for_model(family, **{**{**FAMILIES, **RECURRENT, **REFUSED}.get(family, {}), **overrides})
    torch.manual_seed(0)
    from_config: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = from_config(config, dtype=torch.float32).requires_grad_(False).eval()
    return model


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, no merges."""
    alphabet = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special: dict[str, Any] = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **special)
