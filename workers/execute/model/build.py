"""From configs to a runner that is proven to work and a card that says what it is."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch

from ....protocol.config import CacheConfig, ModelCard, ModelConfig, SchedulerConfig
from ....protocol.errors import ConfigError
from ..attention.cpu import CpuAttention
from ..attention.forward_context import PagedLayers
from ..attention.interface import PagedAttention
from ..attention.reference import ReferenceAttention
from ..sampling.sampler import Sampler
from .checkpoint import find_checkpoint
from .loader import LoadedModel, ModelFacts, Progress, load_model, resolve_device
from .memory import available_bytes
from .pool import allocate_pool, bytes_per_token, size_pages
from .runner import TorchRunner
from .self_test import switch_to_pages
from .tokenizer import load_tokenizer, write_tokenizer

logger = logging.getLogger(__name__)

# Parameters below which a step is too little work to share: a second thread gains nothing on an idle machine, and on a
# busy one each of the many small operators waits for it (1.2 M parameters, two busy cores: 13.7 ms against 0.7).
SMALL_MODEL = 20_000_000
_UNKNOWN_CONTEXT = 1 << 20  # tokens; of a model that names no limit. The pool cuts it to what there is.


def build_runner(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    *,
    model_dir: str | Path,
    run_dir: Path,
    progress: Progress,
) -> tuple[TorchRunner, ModelCard]:
    """The runner of the checkpoint in ``model_dir`` (a directory or a hub id), and its card.

    The tokenizer is written to ``run_dir``; ``progress`` is called with (done, total) tensors while weights load.

    Raises:
        ConfigError: the model cannot be found, read, trusted or held in memory.
    """
    start = time.monotonic()
    device = resolve_device(model_config.device)
    model, facts = _load(model_config, model_dir, run_dir, device, progress)
    torch.set_num_threads(_num_threads(model_config.threads, facts.num_parameters))
    max_model_len = _wanted_len(model_config, facts)
    kernel: PagedAttention = CpuAttention() if device.type == "cpu" else ReferenceAttention()
    shapes = switch_to_pages(model, kernel, max_model_len=max_model_len)
    size = size_pages(
        cache_config,
        bytes_per_token=bytes_per_token(shapes.values()),
        available_bytes=available_bytes(device),
        on_cpu=device.type == "cpu",
        max_live=scheduler_config.max_live,
        max_model_len=max_model_len,
        may_shrink=model_config.max_model_len is None,
    )
    runner = TorchRunner(
        model,
        PagedLayers(kernel, allocate_pool(shapes, size.num_pages, page_size=cache_config.page_size, device=device)),
        Sampler(facts.eos_token_ids),
        prefill_tokens=min(scheduler_config.token_budget, size.max_model_len),
        decode_rows=scheduler_config.max_num_seqs,
        num_host_pages=cache_config.host_pages,
    )
    card = ModelCard(
        model=model_config.model,
        model_type=facts.model_type,
        backend=f"transformers with {type(kernel).__name__}",
        num_parameters=facts.num_parameters,
        dtype=str(model.dtype).removeprefix("torch."),
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


def _load(
    config: ModelConfig, model_dir: str | Path, run_dir: Path, device: torch.device, progress: Progress
) -> LoadedModel:
    """The tokenizer goes out first, so that the other processes can start while weights load."""
    folder = find_checkpoint(model_dir)
    tokenizer = load_tokenizer(folder)
    write_tokenizer(tokenizer, run_dir)
    return load_model(folder, tokenizer, dtype=config.dtype, device=device, progress=progress)


def _wanted_len(config: ModelConfig, facts: ModelFacts) -> int:
    """Tokens of the longest sequence: what was asked for, or what the model can."""
    limit = facts.context_limit or _UNKNOWN_CONTEXT
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the limit of the model is {limit}", param="max_model_len"
        )
    return config.max_model_len or limit


def _num_threads(asked: int | None, num_parameters: int) -> int:
    """As many as asked for. Otherwise torch's choice within the processors we may run on, or one for a small model."""
    if asked is not None:
        return asked
    if num_parameters < SMALL_MODEL:
        return 1
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
