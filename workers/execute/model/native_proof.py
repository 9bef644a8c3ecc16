"""From a checkpoint to a compiled decoder that is proven to work, or the reason why there is none."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

from .checkpoint import check_weights, context_limit, read_config
from .decoder_spec import Unsupported, describe_decoder, find_rope
from .facts import ModelFacts
from .native_build import FORMATS, NativeModel, NativeSetting
from .native_self_test import check_native
from .native_weights import Checkpoint
from .proof import Proof
from .tokenizer import check_vocabulary


def load_native(folder: Path, tokenizer: PreTrainedTokenizerFast, *, dtype: str, setting: NativeSetting) -> NativeModel:
    """The dense decoder in a local checkpoint directory, packed for the kernels.

    Raises:
        Unsupported: the kernels do not compute this model, or not here; the text says why.
        ConfigError: the checkpoint is missing something or damaged.
    """
    config = read_config(folder)
    check_vocabulary(config, tokenizer)
    check_weights(folder)
    checkpoint = Checkpoint(folder)
    spec = describe_decoder(config, checkpoint.shapes())
    compute_dtype = _compute_dtype(config, dtype)
    library, weights = setting.pack(checkpoint, spec, compute_dtype)
    difference = check_native(library, weights, config, checkpoint, num_threads=setting.num_threads(spec))
    checkpoint.forget()
    proof = Proof(
        spec=spec,
        rope=find_rope(config),
        dtype=str(compute_dtype).removeprefix("torch."),
        facts=read_facts(config, folder, tokenizer, checkpoint),
        difference=difference,
    )
    return setting.model(library, weights, proof)


def _compute_dtype(config: PretrainedConfig, name: str) -> torch.dtype:
    dtype = config.dtype if name == "auto" else getattr(torch, name)
    if dtype is None:
        dtype = torch.float32
    if dtype not in FORMATS:
        raise Unsupported(f"its dtype is {dtype}")
    return dtype


def read_facts(
    config: PretrainedConfig, folder: Path, tokenizer: PreTrainedTokenizerFast, checkpoint: Checkpoint
) -> ModelFacts:
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # there is no such file, and the model's config has to do
        generation = GenerationConfig.from_model_config(config)
    eos = generation.eos_token_id
    eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    return ModelFacts(
        model_type=config.model_type,
        num_parameters=sum(checkpoint[name].numel() for name in checkpoint),
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(sorted(int(token_id) for token_id in eos_ids)),
        context_limit=context_limit(config),
    )
