"""The model that execute runs: built once per process, and the same after every restart."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...protocol.config import HASH_MODEL, ModelConfig, PipelineConfig, SchedulerConfig
from ...protocol.errors import ConfigError
from ...protocol.model_card import ModelCard
from ...protocol.run_dir import kv_path, weights_path
from ..importing import MODELS, TORCH, importing
from ..process import WorkerContext
from .hash_build import build_hash_runner
from .kv_file import KvFile
from .scheduling.proposals import FindCosts, Proposer
from .scheduling.scheduler import Scheduler
from .step import Runner
from .weights_file import WeightsFile

logger = logging.getLogger(__name__)

REPORT_INTERVAL_MS = 1.0
CPU_REPORT_INTERVAL_MS = 10.0  # where reporting a step takes processor time from the next one
NUM_DRAFTED = 4  # tokens that a draft model proposes per sequence and step
CPU_MIXED_PREFILL_TOKENS = 128  # a CPU is so slow that other sequences would wait a whole chunk for each token


def preload(config: PipelineConfig) -> None:
    """Import what takes seconds, and read what workers that are forked after an upgrade have to go on with."""
    if config.model.model != HASH_MODEL:
        with importing(TORCH):
            from .kernels.compile import SOURCES, read_sources
            from .model import build  # noqa: F401
            from .model.guard.proof import digest_of_code
        read_sources(SOURCES)
        digest_of_code()
    if config.model.backend == "transformers":  # otherwise an earlier start may have proven what it would be needed for
        with importing(MODELS):
            from .model.modules import build as transformers_build  # noqa: F401


def load_runner(context: WorkerContext) -> tuple[Runner, ModelCard, float]:
    """The runner, the card of its model, and the duration of a full step in seconds."""
    known = ModelCard.read(context.run_dir)
    config = context.config if known is None else _as_before(context.config, known)
    runner: Runner
    if config.model.model == HASH_MODEL:
        kv_file = _kv_file(config, context.run_dir)
        runner, card = build_hash_runner(
            config.model, config.cache, config.scheduler, run_dir=context.run_dir, kv_file=kv_file
        )
        step_s = config.model.hash_step_ms / 1e3 + config.model.hash_token_us / 1e6 * config.scheduler.token_budget
    else:
        runner, card, step_s = _build_torch_runner(config, context, known)
    card = replace(card, adapters={module.name: module.digest() for module in config.model.adapters})
    check_speculation(settle_scheduling(config, card), runner, card)
    if known is None or _weights_of(card) != _weights_of(known):
        _check_successor(card, known)
        card.publish(context.run_dir)
    return runner, card, step_s


def _kv_file(config: PipelineConfig, run_dir: Path) -> KvFile | None:
    """Where pages outlive this process, if they are to, and are kept for their content.

    A draft model would need its own pages too, what is on the host is lost, and a trace tells nothing of the prefixes
    that a process finds.
    """
    cache, is_traced = config.cache, config.scheduler.trace is not None
    is_wanted = cache.retain_kv and cache.prefix_cache and not cache.host_pages and config.model.draft_model is None
    return KvFile.open(kv_path(run_dir)) if is_wanted and not is_traced else None


def _as_before(config: PipelineConfig, known: ModelCard) -> PipelineConfig:
    """The settings of a restart. The pages are those of the first start, as requests admitted under it must still fit,
    and so is the device: if its GPU is lost, its pages would fill the memory of the machine instead.
    """
    device = known.device if config.model.device == "auto" else config.model.device
    cache = replace(config.cache, num_pages=known.num_pages, page_size=known.page_size)
    return replace(config, model=replace(config.model, device=device), cache=cache)


def _weights_of(card: ModelCard) -> tuple[str, str, dict[str, str]]:
    return card.model, card.checkpoint, card.adapters


def settle_scheduling(config: PipelineConfig, card: ModelCard) -> SchedulerConfig:
    """The scheduler's part of ``config``; values left open follow from the machine or from other parts."""
    scheduler = _settle_proposals(config).for_device(card.device)
    leaves_it = scheduler.mixed_prefill_tokens is None and scheduler.itl_target_ms is None
    if leaves_it and card.device == "cpu" and scheduler.policy != "prefill_first":
        return replace(scheduler, mixed_prefill_tokens=CPU_MIXED_PREFILL_TOKENS)
    return scheduler


def _settle_proposals(config: PipelineConfig) -> SchedulerConfig:
    if config.scheduler.num_speculative_tokens is not None:
        return config.scheduler
    return replace(config.scheduler, num_speculative_tokens=NUM_DRAFTED if config.model.draft_model else 0)


def make_scheduler(config: PipelineConfig, card: ModelCard, runner: Runner) -> Scheduler:
    return Scheduler(
        settle_scheduling(config, card),
        page_size=card.page_size,
        num_pages=card.num_pages,
        max_model_len=card.max_model_len,
        prefix_cache=config.cache.prefix_cache,
        num_host_pages=config.cache.host_pages,
        num_snapshots=card.num_snapshots,
        page_records=runner.page_records,
        replays=_must_replay(config.scheduler.recovery, runner),
        proposer=runner.proposer,
        check_costs=runner.check_costs,
    )


def _must_replay(recovery: str, runner: Runner) -> bool:
    """Whether output tokens must be decoded again, for a request to continue exactly as before.

    Where results do not depend on the batch, the faster prefill gives the same numbers: there "exact" costs nothing,
    and "auto" is equivalent to it.
    """
    return recovery == "exact" and not runner.is_batch_invariant


def settle_interval_ms(config: PipelineConfig, card: ModelCard) -> float:
    """How long tokens of short steps may wait to be reported along with those of the following steps."""
    if config.service.report_interval_ms is not None:
        return config.service.report_interval_ms
    return CPU_REPORT_INTERVAL_MS if card.device == "cpu" else REPORT_INTERVAL_MS


def check_speculation(config: SchedulerConfig, runner: Runner, card: ModelCard) -> None:
    """
    Raises:
        ConfigError: this runner cannot check proposals, or the promise of exact recovery would be broken.
    """
    asked_for = f"num_speculative_tokens is {config.num_speculative_tokens}, the limit"
    if not config.num_speculative_tokens:
        return
    if card.keeps_states:
        reason = f"{asked_for} is 0: {card.model_type} has recurrent layers, whose states cannot be rolled back"
    elif runner.check_costs is None:
        reason = (
            f"{asked_for} for {card.backend} on {card.device} is 0: proposals are checked by the compiled kernels of a "
            "CPU, and by Triton's on one GPU"
        )
    elif _must_replay(config.recovery, runner):
        reason = (
            f"{asked_for} for {card.backend} on {card.device} with recovery 'exact' is 0: a token that was proposed is "
            "rounded differently when it is decoded again, unless deterministic is set"
        )
    else:
        return
    raise ConfigError(reason, param="num_speculative_tokens")


def _check_successor(card: ModelCard, known: ModelCard | None) -> None:
    """
    Raises:
        ConfigError: requests admitted for the previous model could be invalid for this one.
    """
    if known is None:
        return
    for name in ("vocab_size", "eos_token_ids", "max_model_len", "num_pages", "embedding_size", "can_generate"):
        if getattr(card, name) != getattr(known, name):
            raise ConfigError(f"{name} of the model is {getattr(card, name)}, {getattr(known, name)} is being served")
    for name, digest in known.adapters.items():
        if card.adapters.get(name, digest) != digest:
            logger.warning(
                "the files of the adapter %r have changed since they were loaded: answers that have begun fail", name
            )
    if card.model == known.model and card.checkpoint != known.checkpoint and known.checkpoint:
        logger.warning(
            "the files of %s have changed since they were loaded: answers that have begun go on with the new weights",
            card.model,
        )


def find_folders(
    config: ModelConfig, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Path, Path | None]:
    """The checkpoint folders of the model and of its draft model. A GGUF file is unpacked first, unless it was before.

    Raises:
        ConfigError: one of them is not found.
    """
    from .model.checkpoint.find import attributed_to_draft, find_checkpoint

    folder = find_checkpoint(config.model, dtype=config.dtype, progress=progress)
    with attributed_to_draft():
        if config.draft_model is None:
            return folder, None
        return folder, find_checkpoint(config.draft_model, dtype=config.dtype, progress=progress)


def _build_torch_runner(
    config: PipelineConfig, context: WorkerContext, known: ModelCard | None
) -> tuple[Runner, ModelCard, float]:
    # First, so that a missing model is reported before torch is imported.
    folder, draft_folder = find_folders(config.model, context.page.progress)
    if context.board.is_degraded:
        draft_folder = None  # it may be the cause of the crashes
    with importing(TORCH):
        from .model.build import build_runner  # the only import of torch, which the hash LM does not need

    runner, card = build_runner(
        config.model,
        config.cache,
        _settle_proposals(config),
        model_dir=folder,
        draft_folder=draft_folder,
        run_dir=context.run_dir,
        progress=context.page.progress,
        kv_file=_kv_file(config, context.run_dir),
        weights_file=WeightsFile.open(weights_path(context.run_dir)),
    )
    context.set_phase("warming")
    step_s = _known_step_s(card, known) or runner.warm_up()
    card = replace(card, full_step_s=step_s)
    if known is None:
        runner.capture_graphs(context.page.progress)
    else:  # it serves at once, and captures graphs on first use, in the memory of the largest
        runner.capture_largest()
    if runner.proposer is not None:
        runner.proposer.warm_up(context.page.progress, is_first=known is None)
        card = _with_guess_costs(card, known, runner.proposer, runner.decode_s)
    return runner, card, step_s


def _known_step_s(card: ModelCard, known: ModelCard | None) -> float:
    """What was measured before a restart; 0.0 if steps must be run again. On a CPU, they take a third of a restart or
    more, and prepare nothing for later ones.
    """
    if known is None or card.device != "cpu" or (card.backend, card.checkpoint) != (known.backend, known.checkpoint):
        return 0.0
    return known.full_step_s


def _with_guess_costs(
    card: ModelCard, known: ModelCard | None, proposer: Proposer, decode_s: Callable[[int], float]
) -> ModelCard:
    """Measure what guesses cost, but not again after a restart: requests would wait, and the machine is busier."""
    if known is None or not known.guess_costs or card.checkpoint != known.checkpoint:
        proposer.measure_costs(decode_s)
    else:
        proposer.costs = tuple(FindCosts(*costs) for costs in known.guess_costs)
    return replace(card, guess_costs=tuple((costs.token, costs.start) for costs in proposer.costs))
