"""What the compiled decoder and the fused one read of a checkpoint before they take its weights."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

from .checkpoint import check_weights, context_limit, read_config
from .decoder_spec import DecoderSpec, Unsupported, describe_decoder
from .facts import ModelFacts
from .native_weights import Checkpoint
from .stored_weights import open_tensors
from .text_part import text_config

_HEAD = "lm_head.weight"


class DenseCheckpoint(NamedTuple):
    config: PretrainedConfig
    tensors: Checkpoint
    spec: DecoderSpec


def open_checkpoint(folder: Path) -> DenseCheckpoint:
    """The dense decoder in a local checkpoint directory.

    Raises:
        Unsupported: it has something that the description of a decoder has no word for.
        ConfigError: the checkpoint is missing something, or damaged.
    """
    config = text_config(read_config(folder))
    check_weights(folder)
    tensors = open_tensors(folder)
    if config.tie_word_embeddings and _has_head(tensors):
        config.tie_word_embeddings = False
    return DenseCheckpoint(config, tensors, describe_decoder(config, tensors.shapes()))


def _has_head(tensors: Checkpoint) -> bool:
    """Whether there is a head that differs from the embedding. Then the two are not tied, as for transformers, whatever
    the config says: that of some models has the default of a family where nothing was said.
    """
    if tensors.has_four_bits(_HEAD):
        return True
    if _HEAD not in tensors:
        return False
    head, embedding = tensors[_HEAD], tensors[DecoderSpec.embedding]
    return head.dtype != embedding.dtype or not torch.equal(head, embedding)


def choose_dtype(config: PretrainedConfig, name: str, known: Collection[torch.dtype]) -> torch.dtype:
    """The dtype of that name; "auto" is the checkpoint's, or float32 where it names none.

    Raises:
        Unsupported: it is none of ``known``.
    """
    dtype: Any = (config.dtype if name == "auto" else getattr(torch, name)) or torch.float32
    if dtype not in known:
        names = " or ".join(str(each).removeprefix("torch.") for each in known)
        raise Unsupported(f"its dtype is {str(dtype).removeprefix('torch.')}, and not asked to be {names}")
    chosen: torch.dtype = dtype
    return chosen


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
        num_parameters=sum(map(prod, checkpoint.shapes().values())),
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(sorted(int(token_id) for token_id in eos_ids)),
        context_limit=context_limit(config),
    )
