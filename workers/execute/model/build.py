"""Builds a proven runner, and the model card that describes it, from configs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ....protocol.config import CacheConfig, ModelConfig, PipelineConfig, SchedulerConfig
from ....protocol.errors import ConfigError
from ....protocol.model_card import ModelCard
from .backends import Backends
from .checkpoint.find import find_checkpoint, read_sampling
from .checkpoint.stored_weights import family_of
from .draft.build import check_setting_of_draft, load_draft, prove_draft
from .embeddings import describe_embeddings
from .facts import Progress, no_progress, take_device
from .give_back import trim_heap
from .guard.proof import digest_of, digest_of_code
from .loaded import Loaded
from .lora import load_adapters
from .parallel.group import Group
from .sizing import size_pool
from .step_runner import StepRunner

if TYPE_CHECKING:
    import torch

    from ..kv_file import KvFile
    from ..weights_file import WeightsFile
    from .modules.runner import TorchRunner
    from .pool import PoolSize


def build_runner(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    *,
    model_dir: str | Path,
    draft_folder: Path | None = None,
    run_dir: Path,
    progress: Progress = no_progress,
    kv_file: KvFile | None = None,
    weights_file: WeightsFile | None = None,
) -> tuple[StepRunner, ModelCard]:
    """Build the runner of the checkpoint in ``model_dir`` (a directory or a hub id), and its model card.

    ``draft_folder`` holds the checkpoint of the draft model, if any. With ``kv_file`` and ``weights_file``, pages and
    packed weights of the compiled kernels outlive this process.

    The tokenizer is written to ``run_dir``; ``progress`` is called with (done, total) tensors while weights load.

    Raises:
        ConfigError: the model cannot be found, read or trusted, or does not fit in memory.
    """
    start = time.monotonic()
    device = _take_device(model_config, draft_folder)
    configs = model_config, cache_config, scheduler_config
    backends = _make_backends(
        configs, device, find_checkpoint(model_dir), progress=progress, spare_cache=spare_cache(run_dir)
    )
    checkpoint = digest_of(backends.folder)
    if kv_file is not None:
        kv_file.claim(checkpoint)
    if weights_file is not None and device.type == "cpu":
        weights_file.claim(f"{checkpoint} {backends.proofs.form} {digest_of_code().hex()}")
    backends = replace(backends, kv_file=kv_file, weights_file=weights_file)
    cache = backends.cache
    proofs = backends.proofs
    loaded = backends.load_proven(proofs, run_dir)
    if loaded is None:
        backends = backends.with_tokenizer(run_dir).with_ranks(run_dir)
        loaded = (
            backends.load_fused(proofs, run_dir)
            or backends.load_native(proofs, run_dir)
            or backends.load_transformers()
        )
    if weights_file is not None:
        weights_file.close()
    if loaded.state_bytes and cache.host_pages:
        raise ConfigError(
            f"host_pages is {cache.host_pages}, the limit is 0: {loaded.facts.model_type} has recurrent "
            "layers, whose states are not swapped",
            param="host_pages",
        )
    draft = load_draft(backends, draft_folder, run_dir) if draft_folder else None
    trim_heap()
    size = size_pool(backends, loaded, draft)
    runner = loaded.make_runner(size)
    if draft:
        runner.proposer = draft.make_model(size, vocab_size=loaded.facts.vocab_size)
    card = _model_card(backends, loaded, size, device=device, checkpoint=checkpoint, load_s=time.monotonic() - start)
    return runner, card


def _take_device(config: ModelConfig, draft_folder: Path | None) -> torch.device:
    """
    Raises:
        ConfigError: this machine has no such device, or a draft model is wanted that cannot run there.
    """
    device = take_device(config.device)
    if draft_folder:
        check_setting_of_draft(config, device)
    return device


def _make_backends(
    configs: tuple[ModelConfig, CacheConfig, SchedulerConfig],
    device: torch.device,
    folder: Path,
    *,
    progress: Progress,
    spare_cache: Path | None,
) -> Backends:
    """
    Raises:
        ConfigError: an adapter cannot be read.
    """
    model, cache, scheduler = configs
    return Backends(
        model, cache.for_device(device.type, quantization=model.quantization), scheduler.for_device(device.type),
        device, folder, progress,
        adapters=load_adapters(model.adapters, family_of(folder)), spare_cache=spare_cache,
    )  # fmt: skip


def _model_card(
    backends: Backends, loaded: Loaded, size: PoolSize, *, device: torch.device, checkpoint: str, load_s: float
) -> ModelCard:
    """``device`` is the configured one; that of ``backends`` may be the part of it that one rank has."""
    facts, scheduler = loaded.facts, backends.scheduler
    embeddings = describe_embeddings(backends.folder)
    why_not = embeddings.why_not
    if not facts.hidden_size:
        why_not = "its modules do not put out hidden states"
    return ModelCard(
        model=backends.config.model,
        model_type=facts.model_type,
        backend=loaded.backend,
        num_parameters=facts.num_parameters,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(device),
        vocab_size=facts.vocab_size,
        max_model_len=size.max_model_len,
        eos_token_ids=facts.eos_token_ids,
        page_size=backends.cache.page_tokens,
        num_pages=size.num_pages,
        max_num_seqs=scheduler.num_rows,
        max_live=scheduler.max_live,
        load_s=load_s,
        num_snapshots=backends.num_snapshots if loaded.state_bytes else None,
        embedding_size=0 if why_not else facts.hidden_size,
        why_no_embeddings=why_not,
        pooling=embeddings.pooling.mode,
        normalizes_embeddings=embeddings.pooling.normalizes,
        prompts=embeddings.prompts,
        default_prompt=embeddings.default_prompt,
        can_generate=facts.has_head,
        kv_dtype=backends.cache.kv_dtype,
        why_slow="; ".join(backends.obstacles),
        sampling=read_sampling(backends.folder),
        checkpoint=checkpoint,
    )


def spare_cache(run_dir: Path) -> Path:
    """Where a pipeline keeps what the user's cache cannot take, as if it is read-only: for its own next starts."""
    return run_dir / "cache"


def rehearse(
    config: PipelineConfig, *, folder: Path, run_dir: Path, draft_folder: Path | None = None, spare: Path | None = None
) -> None:
    """Try what can be tried alongside a running execute, and store the proof. The tokenizer is written to ``run_dir``.

    ``spare`` is the ``spare_cache`` of the pipeline that is running.

    Raises:
        ConfigError: a start with this config would fail.
    """
    device = _take_device(config.model, draft_folder)
    configs = config.model, config.cache, config.scheduler
    backends = _make_backends(configs, device, folder, progress=no_progress, spare_cache=spare)
    backends.prove(backends.proofs, run_dir)
    if draft_folder:
        prove_draft(backends, draft_folder, run_dir)


def build_follower(config: PipelineConfig, *, folder: Path, group: Group) -> TorchRunner:
    """Build the runner of a rank of ``group`` other than 0, the same way rank 0 builds its own: the collective
    operations must be issued in the same order on all ranks.
    """
    configs = config.model, config.cache, config.scheduler  # as rank 0 has settled it
    adapters = load_adapters(config.model.adapters, family_of(folder))
    backends = Backends(*configs, group.device, folder, no_progress, adapters=adapters, group=group)
    loaded = backends.with_tokenizer(None).load_transformers()
    runner = loaded.make_runner(size_pool(backends, loaded))
    return cast("TorchRunner", runner)  # in a group, load_transformers chooses a kernel for it
