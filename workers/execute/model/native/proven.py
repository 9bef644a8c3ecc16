"""Turns a checkpoint into a compiled decoder that is proven to work, or says why that is impossible."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from ..checkpoint.dense import choose_dtype, open_checkpoint, read_facts
from ..guard.proof import Proof
from .build import FORMATS, NativeModel, NativeSetting
from .self_test import check_native

logger = logging.getLogger(__name__)


def load_native(folder: Path, tokenizer: PreTrainedTokenizerFast, *, dtype: str, setting: NativeSetting) -> NativeModel:
    """Pack the dense decoder in a local checkpoint directory for the kernels, and prove that it works.

    Raises:
        Unsupported: the kernels do not support this model, or not on this machine; the message says why.
        ConfigError: the checkpoint is missing something or damaged, or an adapter does not fit it.
    """
    opened = open_checkpoint(folder)
    config, checkpoint, spec = opened.config, opened.tensors, opened.spec
    is_quantised = setting.is_quantised or checkpoint.quantised_format is not None
    if dtype == "auto" and config.dtype == torch.float16:
        dtype = "bfloat16"  # if quantised, only for keys and values: weights and activations are of neither type
        if not is_quantised:
            advice = "choose dtype float32 to have all of their digits, in twice the memory"
            logger.warning("bfloat16 for %s: its weights are stored in float16, %s", folder, advice)
    compute_dtype = choose_dtype(config, dtype, FORMATS)
    library, weights = setting.pack(folder, checkpoint, spec, opened.ropes, compute_dtype)
    adapters = setting.pack_adapters(weights)
    difference = check_native(
        library, weights, config, checkpoint, ropes=opened.ropes,
        num_threads=setting.num_threads(spec), packed=adapters, adapters=setting.adapters,
        eight_bit_pages=setting.has_eight_bit_pages,
    )  # fmt: skip
    checkpoint.forget()
    proof = Proof(
        spec=spec,
        ropes=tuple(opened.ropes),
        dtype=str(compute_dtype).removeprefix("torch."),
        facts=read_facts(opened, tokenizer),
        difference=difference,
    )
    return setting.model(library, weights, adapters, proof)
