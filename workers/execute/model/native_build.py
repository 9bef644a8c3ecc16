"""From a checkpoint to a compiled decoder that is proven to work, or the reason why there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

from ..kernels.compile import NoCompiler, available_levels
from ..kernels.library import load_library
from ..kernels.structures import Format
from .checkpoint import check_weights, context_limit, read_config
from .decoder_spec import Unsupported, describe_decoder, rope_tables
from .loader import ModelFacts, Progress
from .native_decoder import NativeDecoder
from .native_self_test import check_native
from .native_weights import Checkpoint, PackedWeights
from .pool import LayerShape

_TILE_TOKENS = 16  # of a page, see kernels/src/attention.h
_FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}


@dataclass(frozen=True, slots=True)
class NativeModel:
    """Weights that passed the self-test. ``make_decoder(num_pages, max_model_len)`` gives them their pages."""

    facts: ModelFacts
    dtype: torch.dtype
    backend: str
    shapes: list[LayerShape]
    make_decoder: Callable[[int, int], NativeDecoder]
    why: str  # it was taken: what runs where, and how far its logits are from transformers'


def load_native(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    dtype: str,
    quantization: str,
    page_size: int,
    threads: int | None,
    progress: Progress,
) -> NativeModel:
    """The dense decoder in a local checkpoint directory, packed for the kernels.

    Raises:
        Unsupported: the kernels do not compute this model, or not here; the text says why.
        ConfigError: the checkpoint is missing something or damaged.
    """
    if page_size % _TILE_TOKENS:
        raise Unsupported(f"a page has {page_size} tokens, which is no multiple of {_TILE_TOKENS}")
    config = read_config(folder)
    check_weights(folder)
    checkpoint = Checkpoint(folder)
    spec = describe_decoder(config, checkpoint.shapes())
    if spec.head_dim % _TILE_TOKENS:
        raise Unsupported(f"its heads have {spec.head_dim} channels, which is no multiple of {_TILE_TOKENS}")
    compute_dtype = _compute_dtype(config, dtype)
    format_ = Format.INT8 if quantization == "int8" else _FORMATS[compute_dtype]
    num_threads = threads or min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    try:
        library = load_library()
    except NoCompiler as error:
        raise Unsupported(str(error)) from error
    weights = PackedWeights(
        spec, checkpoint, library=library, format_=format_, num_threads=num_threads, progress=progress
    )
    difference = check_native(library, weights, config, checkpoint, num_threads=num_threads)
    checkpoint.forget()

    def make_decoder(num_pages: int, max_model_len: int) -> NativeDecoder:
        rope = rope_tables(config, max_model_len)
        return NativeDecoder(library, weights, rope, num_pages=num_pages, page_size=page_size, num_threads=num_threads)

    shape = LayerShape(
        spec.num_kv_heads, spec.head_dim, spec.head_dim, torch.float32 if format_ is Format.FLOAT32 else torch.bfloat16
    )
    return NativeModel(
        facts=read_facts(config, folder, tokenizer, checkpoint),
        dtype=compute_dtype,
        backend=f"native {format_.name.lower()}",
        shapes=[shape] * spec.num_layers,
        make_decoder=make_decoder,
        why=f"{format_.name.lower()}, {available_levels()[0]}, {num_threads} threads; "
        f"its logits differ from transformers' by {difference:.1g} of the greatest",
    )


def _compute_dtype(config: PretrainedConfig, name: str) -> torch.dtype:
    dtype = config.dtype if name == "auto" else getattr(torch, name)
    if dtype is None:
        dtype = torch.float32
    if dtype not in _FORMATS:
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
