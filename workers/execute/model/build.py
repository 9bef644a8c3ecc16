"""From configs to a runner that is proven to work and a card that says what it is."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ....protocol.config import CacheConfig, ModelCard, ModelConfig, PipelineConfig, SchedulerConfig
from ....protocol.errors import ConfigError
from ..attention.cpu import CpuAttention
from ..attention.forward_context import PagedLayers
from ..attention.interface import LayerCache
from ..attention.reference import ReferenceAttention
from ..kernels.support import why_no_triton
from ..sampling.sampler import Sampler
from .checkpoint import find_checkpoint, read_config
from .decoder_spec import Unsupported
from .device_forward import DeviceAttention, DeviceForward, TransformersForward
from .device_runner import DeviceRunner
from .give_back import trim_heap
from .graphs import CudaGraphCapture
from .group import ALONE, Group, check_divides
from .loader import ModelFacts, Progress, load_model, resolve_device
from .memory import available_bytes
from .native_build import NativeModel, load_native
from .native_runner import NativeRunner
from .overhead import step_overhead
from .pool import LayerShape, PoolSize, allocate_pool, bytes_per_token, size_pages
from .ranks import LeadingRunner, Ranks
from .runner import TorchRunner
from .self_test import switch_to_pages
from .step_runner import StepRunner
from .tokenizer import load_tokenizer, write_tokenizer

if TYPE_CHECKING:
    from .fused_build import FusedModel

logger = logging.getLogger(__name__)

# Parameters below which a step is too little work to share: a second thread gains nothing on an idle machine, and on a
# busy one each of the many small operators waits for it (1.2 M parameters, two busy cores: 13.7 ms against 0.7).
SMALL_MODEL = 20_000_000
_UNKNOWN_CONTEXT = 1 << 20  # tokens; of a model that names no limit. The pool cuts it to what there is.


class _Loaded(NamedTuple):
    """A model in memory, before it has pages."""

    facts: ModelFacts
    dtype: torch.dtype
    backend: str
    shapes: list[LayerShape]
    make_runner: Callable[[PoolSize], StepRunner]


def build_runner(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    *,
    model_dir: str | Path,
    run_dir: Path,
    progress: Progress,
) -> tuple[StepRunner, ModelCard]:
    """The runner of the checkpoint in ``model_dir`` (a directory or a hub id), and its card.

    The tokenizer is written to ``run_dir``; ``progress`` is called with (done, total) tensors while weights load.

    Raises:
        ConfigError: the model cannot be found, read, trusted or held in memory.
    """
    start = time.monotonic()
    device = resolve_device(model_config.device)
    folder = find_checkpoint(model_dir)
    tokenizer = load_tokenizer(folder)
    write_tokenizer(tokenizer, run_dir)  # first, so that the other processes can start while weights load
    loader = _Loader(model_config, cache_config, scheduler_config, device, folder, tokenizer, progress)
    if model_config.tensor_parallel_size > 1:
        loader = loader.with_ranks(run_dir)
    loaded = loader.load_fused() or loader.load_native() or loader.load_transformers()
    trim_heap()
    size = loader.size_pages(loaded)
    runner = loaded.make_runner(size)
    card = ModelCard(
        model=model_config.model,
        model_type=loaded.facts.model_type,
        backend=loaded.backend,
        num_parameters=loaded.facts.num_parameters,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(device),
        vocab_size=loaded.facts.vocab_size,
        max_model_len=size.max_model_len,
        eos_token_ids=loaded.facts.eos_token_ids,
        page_size=cache_config.page_size,
        num_pages=size.num_pages,
        max_num_seqs=scheduler_config.max_num_seqs,
        max_live=scheduler_config.max_live,
        load_s=time.monotonic() - start,
    )
    return runner, card


def build_follower(config: PipelineConfig, *, folder: Path, group: Group) -> TorchRunner:
    """The runner of a rank of ``group`` other than 0, made as rank 0 makes its own: all that they compute together
    must come in the same order.
    """
    tokenizer = load_tokenizer(folder)
    loader = _Loader(
        config.model, config.cache, config.scheduler, group.device, folder, tokenizer, _no_progress, group=group
    )
    loaded = loader.load_transformers()
    runner = loaded.make_runner(loader.size_pages(loaded))
    assert isinstance(runner, TorchRunner), "the transformers path was asked for"
    return runner


def _no_progress(done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Loader:
    """The ways to a model, the fastest first; each says in one line of the log why it was or was not taken."""

    config: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: torch.device
    folder: Path
    tokenizer: PreTrainedTokenizerFast
    progress: Progress
    group: Group = ALONE
    ranks: Ranks | None = None  # the others of the group, on rank 0

    def with_ranks(self, run_dir: Path) -> _Loader:
        """This loader as rank 0 of as many as the config says. The others are started, and load what it loads.

        Raises:
            ConfigError: the model cannot be cut, or what is asked for works on one rank only.
        """
        config, size = self.config, self.config.tensor_parallel_size
        for name, value, common in (
            ("backend", config.backend, ("auto", "transformers")),
            ("quantization", config.quantization, ("none",)),
        ):
            if value not in common:
                raise ConfigError(
                    f"{name} is {value!r} and tensor_parallel_size {size}: it runs on one rank only", param=name
                )
        check_divides(read_config(self.folder), self.device, size)
        configs = (config, self.cache, self.scheduler)
        ranks = Ranks(configs, folder=self.folder, run_dir=run_dir, device=self.device)
        return replace(self, device=ranks.group.device, group=ranks.group, ranks=ranks)

    def size_pages(self, loaded: _Loaded) -> PoolSize:
        """The same for all ranks. On a CPU they share the memory, on GPUs each has its own."""
        on_cpu, wanted_len = self.device.type == "cpu", _wanted_len(self.config, loaded.facts)
        # Nothing is tried out on several ranks: one that computes by itself puts them out of step.
        is_tried = not self.cache.num_pages and self.group.size == 1
        overhead = step_overhead(loaded.make_runner, self.device, wanted_len) if is_tried else 0
        return size_pages(
            self.cache,
            bytes_per_token=bytes_per_token(loaded.shapes) * (self.group.size if on_cpu else 1),
            available_bytes=self.group.least(available_bytes(self.device) - overhead),
            on_cpu=on_cpu,
            max_live=self.scheduler.max_live,
            max_model_len=wanted_len,
            may_shrink=self.config.max_model_len is None,
        )

    def load_fused(self) -> _Loaded | None:
        """The model on fused kernels of the GPU, or None where another path has to serve it.

        Raises:
            ConfigError: these kernels were asked for, by name or by what only they do.
        """
        config = self.config
        if self.group.size > 1:
            return None
        is_asked_for = config.backend == "fused" or config.quantization == "fp8"
        is_asked_for |= config.deterministic and self.device.type == "cuda"
        if not is_asked_for and (config.backend != "auto" or self.device.type != "cuda"):
            return None
        try:
            fused = self._fused_model()
        except Unsupported as error:
            if is_asked_for:
                reason = f"{config.model} cannot run on the fused kernels: {error}"
                raise ConfigError(reason, param="backend") from error
            logger.warning("transformers' own modules run the model, not the fused kernels: %s", error)
            return None

        def make_runner(size: PoolSize) -> DeviceRunner:
            decoder = fused.make_decoder(size.num_pages, size.max_model_len)
            runner = self._device_runner(decoder, decoder.caches, fused.facts, size)
            runner.is_batch_invariant = self.config.deterministic
            return runner

        return _Loaded(fused.facts, fused.dtype, fused.backend, fused.shapes, make_runner)

    def _fused_model(self) -> FusedModel:
        if self.config.backend not in ("auto", "fused"):
            raise Unsupported(f"backend is {self.config.backend!r}, it must be 'fused' or 'auto'")
        if (why := why_no_triton(self.device)) is not None:
            raise Unsupported(why)
        from .fused_build import load_fused  # here, since Triton does not exist for every device

        return load_fused(
            self.folder,
            self.tokenizer,
            dtype=self.config.dtype,
            quantization=self.config.quantization,
            is_invariant=self.config.deterministic,
            page_size=self.cache.page_size,
            device=self.device,
            progress=self.progress,
        )

    def _device_runner(
        self, forward: DeviceForward, caches: Iterable[LayerCache], facts: ModelFacts, size: PoolSize
    ) -> DeviceRunner:
        is_graphed = self.device.type == "cuda" and self.config.cuda_graphs
        return DeviceRunner(
            [pages for cache in caches for pages in cache],
            forward,
            Sampler(facts.eos_token_ids),
            device=self.device,
            max_sampled=self.scheduler.max_live,
            max_pages=-(-size.max_model_len // self.cache.page_size),
            capture=CudaGraphCapture() if is_graphed else None,
            **self._runner_sizes(size),
        )

    def load_native(self) -> _Loaded | None:
        """The model on the compiled kernels, or None where the transformers path has to serve it.

        Raises:
            ConfigError: the kernels were asked for, by name or by a quantization that only they know.
        """
        config = self.config
        try:
            native = self._native_model()
        except Unsupported as error:
            if config.backend == "native" or config.quantization != "none" or config.deterministic:
                reason = f"{config.model} cannot run on the native kernels: {error}"
                raise ConfigError(reason, param="backend") from error
            if config.backend == "auto" and self.device.type == "cpu":
                slower = (
                    "transformers' modules run the model, which takes 3 to 10 times as long as the compiled kernels"
                )
                logger.warning("%s: %s", slower, error)
            return None

        logger.info("the compiled kernels run the model: %s", native.why)

        def make_runner(size: PoolSize) -> NativeRunner:
            decoder = native.make_decoder(size.num_pages, size.max_model_len)
            return NativeRunner(decoder, Sampler(native.facts.eos_token_ids), **self._runner_sizes(size))

        return _Loaded(native.facts, native.dtype, native.backend, native.shapes, make_runner)

    def _native_model(self) -> NativeModel:
        if self.config.backend == "transformers":
            raise Unsupported("backend is 'transformers'")
        if self.group.size > 1:
            raise Unsupported(f"tensor_parallel_size is {self.group.size}")
        if self.device.type != "cpu":
            raise Unsupported(f"the device is {self.device}")
        return load_native(
            self.folder,
            self.tokenizer,
            dtype=self.config.dtype,
            quantization=self.config.quantization,
            page_size=self.cache.page_size,
            threads=self.config.threads,
            progress=self.progress,
        )

    def load_transformers(self) -> _Loaded:
        device = self.device
        model, facts = load_model(
            self.folder,
            self.tokenizer,
            dtype=self.config.dtype,
            device=device,
            progress=self.progress,
            group=self.group,
        )
        torch.set_num_threads(_num_threads(self.config.threads, facts.num_parameters, self.group.size))
        kernel = CpuAttention() if device.type == "cpu" else _device_kernel(device, self.group)
        shapes = switch_to_pages(model, kernel, max_model_len=_wanted_len(self.config, facts))

        def make_runner(size: PoolSize) -> StepRunner:
            pool = allocate_pool(shapes, size.num_pages, page_size=self.cache.page_size, device=device)
            layers = PagedLayers(kernel, pool)
            if isinstance(kernel, (CpuAttention, ReferenceAttention)):
                return self._plain_runner(model, layers, facts, size)
            forward = TransformersForward(model, layers, kernel)
            return self._device_runner(forward, pool.values(), facts, size)

        shared = f" on {self.group.size} ranks" if self.group.size > 1 else ""
        backend = f"transformers with {type(kernel).__name__}{shared}"
        return _Loaded(facts, model.dtype, backend, list(shapes.values()), make_runner)

    def _plain_runner(
        self, model: PreTrainedModel, layers: PagedLayers, facts: ModelFacts, size: PoolSize
    ) -> TorchRunner:
        sampler, sizes = Sampler(facts.eos_token_ids), self._runner_sizes(size)
        if self.ranks is not None:
            return LeadingRunner(self.ranks, model, layers, sampler, **sizes)
        return TorchRunner(model, layers, sampler, **sizes)

    def _runner_sizes(self, size: PoolSize) -> dict[str, int]:
        return {
            "prefill_tokens": min(self.scheduler.token_budget, size.max_model_len),
            "decode_rows": self.scheduler.max_num_seqs,
            "num_host_pages": self.cache.host_pages,
        }


def _device_kernel(device: torch.device, group: Group) -> DeviceAttention | ReferenceAttention:
    """Attention by Triton where there is one, else by its definition, which is slow."""
    why = why_no_triton(device) if group.size == 1 else f"tensor_parallel_size is {group.size}"
    if why is not None:
        logger.warning("attention runs by its definition, which is slow: %s", why)
        return ReferenceAttention()
    from ..attention.triton import TritonAttention

    return TritonAttention(device)


def _wanted_len(config: ModelConfig, facts: ModelFacts) -> int:
    """Tokens of the longest sequence: what was asked for, or what the model can."""
    limit = facts.context_limit or _UNKNOWN_CONTEXT
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the limit of the model is {limit}", param="max_model_len"
        )
    return config.max_model_len or limit


def _num_threads(asked: int | None, num_parameters: int, num_ranks: int) -> int:
    """As many as asked for. Otherwise torch's choice within the processors we may run on, shared by the ranks, or one
    for a small model.
    """
    if asked is not None:
        return asked
    if num_parameters < SMALL_MODEL:
        return 1
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0))) // num_ranks)
