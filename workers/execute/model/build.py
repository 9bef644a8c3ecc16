"""From configs to a runner that is proven to work and a card that says what it is."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from ....protocol.config import CacheConfig, ModelCard, ModelConfig, SchedulerConfig
from ....protocol.errors import ConfigError
from ..attention.cpu import CpuAttention
from ..attention.forward_context import PagedLayers
from ..attention.interface import PagedAttention
from ..attention.reference import ReferenceAttention
from ..sampling.sampler import Sampler
from .checkpoint import find_checkpoint
from .decoder_spec import Unsupported
from .loader import ModelFacts, Progress, load_model, resolve_device
from .memory import available_bytes
from .native_build import NativeModel, load_native
from .native_runner import NativeRunner
from .pool import allocate_pool, bytes_per_token, size_pages
from .runner import TorchRunner
from .self_test import switch_to_pages
from .tokenizer import load_tokenizer, write_tokenizer

logger = logging.getLogger(__name__)

_UNKNOWN_CONTEXT = 1 << 20  # tokens; of a model that names no limit. The pool cuts it to what there is.


def build_runner(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    *,
    model_dir: str | Path,
    run_dir: Path,
    progress: Progress,
) -> tuple[TorchRunner | NativeRunner, ModelCard]:
    """The runner of the checkpoint in ``model_dir`` (a directory or a hub id), and its card.

    The tokenizer is written to ``run_dir``; ``progress`` is called with (done, total) tensors while weights load.

    Raises:
        ConfigError: the model cannot be found, read, trusted or held in memory.
    """
    start = time.monotonic()
    device = resolve_device(model_config.device)
    _limit_threads(model_config.threads)
    folder = find_checkpoint(model_dir)
    tokenizer = load_tokenizer(folder)
    write_tokenizer(tokenizer, run_dir)  # first, so that the other processes can start while weights load
    facts: ModelFacts
    native = _load_native(model_config, cache_config, folder, tokenizer, device, progress)
    if native is not None:
        facts, shapes, dtype, backend = native.facts, native.shapes, native.dtype, native.backend
        max_model_len = _wanted_len(model_config, facts)
    else:
        model, facts = load_model(folder, tokenizer, dtype=model_config.dtype, device=device, progress=progress)
        max_model_len = _wanted_len(model_config, facts)
        kernel: PagedAttention = CpuAttention() if device.type == "cpu" else ReferenceAttention()
        layers = switch_to_pages(model, kernel, max_model_len=max_model_len)
        shapes, dtype, backend = list(layers.values()), model.dtype, f"transformers with {type(kernel).__name__}"
    size = size_pages(
        cache_config,
        bytes_per_token=bytes_per_token(shapes),
        available_bytes=available_bytes(device),
        on_cpu=device.type == "cpu",
        max_live=scheduler_config.max_live,
        max_model_len=max_model_len,
        may_shrink=model_config.max_model_len is None,
    )
    limits = {
        "prefill_tokens": min(scheduler_config.token_budget, size.max_model_len),
        "decode_rows": scheduler_config.max_num_seqs,
    }
    sampler = Sampler(facts.eos_token_ids)
    runner: TorchRunner | NativeRunner
    if native is not None:
        runner = NativeRunner(native.make_decoder(size.num_pages, size.max_model_len), sampler, **limits)
    else:
        pool = allocate_pool(layers, size.num_pages, page_size=cache_config.page_size, device=device)
        runner = TorchRunner(model, PagedLayers(kernel, pool), sampler, **limits)
    card = ModelCard(
        model=model_config.model,
        model_type=facts.model_type,
        backend=backend,
        num_parameters=facts.num_parameters,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        vocab_size=facts.vocab_size,
        max_model_len=size.max_model_len,
        eos_token_ids=facts.eos_token_ids,
        page_size=cache_config.page_size,
        num_pages=size.num_pages,
        max_num_seqs=scheduler_config.max_num_seqs,
        max_live=scheduler_config.max_live,
        load_s=time.monotonic() - start,
    )
    return runner, card


def _load_native(
    config: ModelConfig,
    cache: CacheConfig,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    device: torch.device,
    progress: Progress,
) -> NativeModel | None:
    """The model for the compiled kernels, or None where the transformers path has to serve it.

    Raises:
        ConfigError: the kernels were asked for, by name or by a quantization that only they know.
    """
    is_required = config.backend == "native" or config.quantization != "none"
    try:
        if config.backend == "transformers":
            raise Unsupported("backend is 'transformers'")
        if device.type != "cpu":
            raise Unsupported(f"the device is {device}")
        return load_native(
            folder,
            tokenizer,
            dtype=config.dtype,
            quantization=config.quantization,
            page_size=cache.page_size,
            threads=config.threads,
            progress=progress,
        )
    except Unsupported as error:
        if is_required:
            raise ConfigError(f"{config.model} cannot run on the native kernels: {error}", param="backend") from error
        if config.backend == "auto" and device.type == "cpu":
            logger.warning("decoding will take 3 to 10 times as long, without the native kernels: %s", error)
    return None


def _wanted_len(config: ModelConfig, facts: ModelFacts) -> int:
    """Tokens of the longest sequence: what was asked for, or what the model can."""
    limit = facts.context_limit or _UNKNOWN_CONTEXT
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the limit of the model is {limit}", param="max_model_len"
        )
    return config.max_model_len or limit


def _limit_threads(threads: int | None) -> None:
    """As many as asked for; by default torch's choice, and never more than the processors we may run on."""
    torch.set_num_threads(threads or min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
