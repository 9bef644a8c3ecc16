"""What the compiled decoder and the fused decoder read from a checkpoint before loading its weights."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

from ..facts import ModelFacts, end_tokens
from ..pooling import may_lack_head
from ..spec.decoder import DecoderSpec, Unsupported
from ..spec.describe import describe_decoder
from ..spec.families import FAMILIES
from ..spec.family import Family
from .find import check_generation_config, check_weights, context_limit, read_config
from .mapped import Checkpoint
from .stored_weights import open_tensors
from .text_part import text_config

_HEAD = "lm_head.weight"


class DenseCheckpoint(NamedTuple):
    config: PretrainedConfig
    tensors: Checkpoint
    spec: DecoderSpec
    has_head: bool  # if not, the embedding stands in for it


def open_checkpoint(folder: Path) -> DenseCheckpoint:
    """Open the dense decoder in a local checkpoint directory.

    Raises:
        Unsupported: it has a feature that ``DecoderSpec`` cannot express.
        ConfigError: the checkpoint is incomplete or damaged.
    """
    config = text_config(read_config(folder))
    check_generation_config(folder)
    check_weights(folder)
    tensors = open_tensors(folder)
    shapes, is_tied = tensors.shapes(), bool(getattr(config, "tie_word_embeddings", False))
    has_head = is_tied or _HEAD in shapes or not may_lack_head(folder)
    config.tie_word_embeddings = not has_head or (is_tied and not _has_own_head(config, tensors))
    return DenseCheckpoint(config, tensors, describe_decoder(config, shapes), has_head)


def _has_own_head(config: PretrainedConfig, tensors: Checkpoint) -> bool:
    """Whether the checkpoint has a head that differs from the embedding.

    If so, the two are not tied, whatever the config says; transformers decides likewise. In some models' configs the
    setting is only the family's default.
    """
    if tensors.has_four_bits(_HEAD):
        return True
    family = FAMILIES.get(config.model_type, Family())
    name = f"{family.modules.embedding}.weight"
    if _HEAD not in tensors or name not in tensors:
        return False
    head, embedding = tensors[_HEAD], tensors[name]
    return head.dtype != embedding.dtype or not torch.equal(head, embedding)


def choose_dtype(config: PretrainedConfig, name: str, known: Collection[torch.dtype]) -> torch.dtype:
    """Return the named dtype; "auto" is the checkpoint's, or float32 if the checkpoint names none.

    Raises:
        Unsupported: the dtype is not in ``known``.
    """
    dtype: Any = (config.dtype if name == "auto" else getattr(torch, name)) or torch.float32
    if dtype not in known:
        names = " or ".join(str(each).removeprefix("torch.") for each in known)
        raise Unsupported(f"its dtype is {str(dtype).removeprefix('torch.')}, choose {names}")
    chosen: torch.dtype = dtype
    return chosen


def read_facts(opened: DenseCheckpoint, folder: Path, tokenizer: PreTrainedTokenizerFast) -> ModelFacts:
    config, spec = opened.config, opened.spec
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # no such file: fall back to the model's config
        generation = GenerationConfig.from_model_config(config)
    return ModelFacts(
        model_type=config.model_type,
        num_parameters=sum(map(prod, spec.tensors().values())),
        vocab_size=config.vocab_size,
        eos_token_ids=end_tokens(tokenizer, generation),
        context_limit=context_limit(config),
        hidden_size=spec.hidden_size,
        has_head=opened.has_head,
    )
