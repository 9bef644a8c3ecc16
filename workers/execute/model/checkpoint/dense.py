"""What the compiled decoder and the fused decoder read from a checkpoint before loading its weights."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from .....protocol.errors import ConfigError
from ..embeddings import may_lack_head
from ..facts import ModelFacts, end_tokens
from ..spec.decoder import DecoderSpec, Unsupported
from ..spec.describe import describe_decoder
from ..spec.families import FAMILIES
from ..spec.family import Family
from ..spec.ropes import Rope, find_ropes
from .find import check_weights, context_limit, read_config, read_end_tokens
from .hub import first_line
from .mapped import Checkpoint
from .stored_weights import open_tensors
from .text_part import text_config

_HEAD = "lm_head.weight"


class DenseCheckpoint(NamedTuple):
    """An open checkpoint, and the decoder that it describes."""

    config: PretrainedConfig
    tensors: Checkpoint
    spec: DecoderSpec
    ropes: list[Rope]  # numbered as in the spec
    eos_token_ids: list[int] | int | None  # that a config states
    has_head: bool  # if not, the embedding stands in for it


def open_checkpoint(folder: Path) -> DenseCheckpoint:
    """Open the dense decoder in a local checkpoint directory.

    Raises:
        Unsupported: it has a feature that ``DecoderSpec`` cannot express.
        ConfigError: the checkpoint is incomplete or damaged.
    """
    config = text_config(read_config(folder))
    ends: list[int] | int | None = read_end_tokens(folder)
    check_weights(folder)
    tensors = open_tensors(folder)
    shapes, is_tied = tensors.shapes(), bool(getattr(config, "tie_word_embeddings", False))
    has_head = is_tied or _HEAD in shapes or not may_lack_head(folder)
    config.tie_word_embeddings = not has_head or (is_tied and not _has_own_head(config, tensors))
    try:
        spec, ropes = describe_decoder(config, shapes), find_ropes(config)
    except (Unsupported, ConfigError):
        raise
    except Exception as error:  # config classes check little of what they keep
        raise Unsupported(f"its config has a wrong value: {type(error).__name__}: {first_line(error)}") from error
    ends = getattr(config, "eos_token_id", None) if ends is None else ends
    return DenseCheckpoint(config, tensors, spec, ropes, ends, has_head)


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


def read_facts(opened: DenseCheckpoint, tokenizer: PreTrainedTokenizerFast) -> ModelFacts:
    config, spec = opened.config, opened.spec
    return ModelFacts(
        model_type=config.model_type,
        num_parameters=sum(map(prod, spec.tensors().values())),
        vocab_size=config.vocab_size,
        eos_token_ids=end_tokens(tokenizer, opened.eos_token_ids),
        context_limit=context_limit(config),
        hidden_size=spec.hidden_size,
        has_head=opened.has_head,
    )
