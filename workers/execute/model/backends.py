"""The backends that load and run a model: fused kernels, compiled kernels, transformers' own modules."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ....protocol.config import KV_DTYPES, CacheConfig, ModelConfig, SchedulerConfig
from ....protocol.errors import ConfigError
from ...importing import MODELS, TRANSFORMERS, importing
from ..kernels.memory import Arena, MakeArena
from ..kernels.support import why_no_triton
from ..sampling.sampler import Sampler
from ..scheduling.states import num_state_rows
from .checkpoint.find import num_outputs, read_config
from .facts import ModelFacts, Progress
from .guard.proof import ProofStore, digest_of_code
from .loaded import Loaded
from .lora import Adapter
from .memory import available_bytes
from .native.build import NativeModel, NativeSetting, load_proven
from .native.late_adapters import LateAdapters
from .native.runner import NativeRunner
from .parallel.group import ALONE, Group, check_divides
from .pool import PoolSize
from .spec.decoder import Unsupported
from .step_runner import StepRunner
from .threads import num_processors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ..attention.interface import LayerCache
    from ..kv_file import KvFile
    from ..weights_file import WeightsFile
    from .device.forward import DeviceForward
    from .device.runner import DeviceRunner
    from .fused.build import FusedModel, FusedSetting
    from .parallel.ranks import Ranks

logger = logging.getLogger(__name__)

PROOF_SHARE = 3  # multiple of the checkpoint's size that must be free to try it alongside the running model


@dataclass(frozen=True, slots=True)
class Backends:
    """The backends that one model may run on, fastest first. Each logs in one line why it was or was not chosen."""

    config: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: torch.device
    folder: Path
    progress: Progress
    tokenizer: PreTrainedTokenizerFast | None = None
    adapters: Sequence[Adapter] = ()
    is_draft: bool = False  # whether the model proposes tokens for another one
    spare_cache: Path | None = None  # where what is worth keeping goes if the user's cache cannot take it
    kv_file: KvFile | None = None  # where pages of the compiled kernels outlive this process
    weights_file: WeightsFile | None = None  # where their packed weights do
    group: Group = ALONE
    ranks: Ranks | None = None  # on rank 0, the other ranks of the group
    refusals: list[str] = field(default_factory=list)  # which faster backends refused the model, and why
    obstacles: list[str] = field(default_factory=list)  # what that means for the backend chosen

    def with_tokenizer(self, run_dir: Path | None) -> Backends:
        """Return these backends with the checkpoint's tokenizer, and write it to ``run_dir``, so that the other
        processes can start while weights load.

        Raises:
            ConfigError: there is no usable tokenizer, or it belongs to another model.
        """
        with importing(TRANSFORMERS):
            from .tokenizer import load_tokenizer, write_tokenizer

        tokenizer = load_tokenizer(self.folder)
        if run_dir is not None:
            write_tokenizer(tokenizer, run_dir, vocab_size=num_outputs(read_config(self.folder)))
        return replace(self, tokenizer=tokenizer)

    def with_ranks(self, run_dir: Path) -> Backends:
        """Return these backends for rank 0 of the configured number. Starts the other ranks, which load the same model.

        Raises:
            ConfigError: the model cannot be split, or a requested feature works on one rank only.
        """
        config, size = self.config, self.config.tensor_parallel_size
        if size == 1:
            return self
        from .parallel.ranks import Ranks

        kv_dtypes = ("model",) if self.device.type == "cpu" else KV_DTYPES
        for name, value, common in (
            ("backend", config.backend, ("auto", "transformers")),
            ("quantization", config.quantization, ("none",)),
            ("kv_dtype", self.cache.kv_dtype, kv_dtypes),
        ):
            if value not in common:
                raise ConfigError(
                    f"{name} is {value!r} and tensor_parallel_size {size}: it runs on one rank only", param=name
                )
        check_divides(read_config(self.folder), self.device, size)
        configs = (config, self.cache, self.scheduler)
        ranks = Ranks(configs, folder=self.folder, run_dir=run_dir, device=self.device)
        return replace(self, device=ranks.group.device, group=ranks.group, ranks=ranks)

    def load_fused(self, proofs: ProofStore, run_dir: Path) -> Loaded | None:
        """Load the model on fused GPU kernels; None if another backend has to serve it.

        Raises:
            ConfigError: the model cannot run on these kernels, but they were requested, by name or by a setting that
                only they support.
        """
        config = self.config
        if self.group.size > 1:
            return None
        is_asked_for = config.backend == "fused" or config.quantization == "fp8"
        is_asked_for |= config.deterministic and self.device.type == "cuda"
        if not is_asked_for and (config.backend != "auto" or self.device.type != "cuda"):
            return None
        try:
            if (why_not := self._why_not_fused()) is not None:
                raise Unsupported(why_not)
            with importing(MODELS):
                from .fused.proven import load_fused

            fused, proof = load_fused(self.folder, self._tokenizer, dtype=config.dtype, setting=self._fused_setting)
        except Unsupported as error:
            if is_asked_for:
                reason = f"{config.model} cannot run on the fused kernels: {error}"
                raise ConfigError(reason, param="backend") from error
            self._refuse("the fused kernels", error, "transformers' own modules run the model, not")
            return None
        if self.device.type == "cuda":  # elsewhere the kernels are interpreted, in tests
            proofs.keep(proof, run_dir)
        return self._fused(fused, proof.facts)

    def _fused(self, fused: FusedModel, facts: ModelFacts) -> Loaded:
        def make_runner(size: PoolSize) -> DeviceRunner:
            decoder = fused.make_decoder(size.num_pages, size.max_model_len, self.cache.page_tokens)
            runner = self._device_runner(decoder, decoder.caches, facts, size)
            runner.is_batch_invariant = self.config.deterministic
            return runner

        return Loaded(facts, fused.weights.format.dtype, fused.backend, fused.shapes, make_runner)

    def _why_not_fused(self) -> str | None:
        if self.config.backend not in ("auto", "fused"):
            return f"backend is {self.config.backend!r}, it must be 'fused' or 'auto'"
        return why_no_triton(self.device)

    @property
    def _fused_setting(self) -> FusedSetting:
        from .fused.build import FusedSetting  # here, as Triton is not available for every device

        return FusedSetting(
            quantization=self.config.quantization,
            is_invariant=self.config.deterministic,
            has_eight_bit_pages=self.has_eight_bit_pages,
            device=self.device,
            adapters=self.adapters,
            progress=self.progress,
        )

    def _device_runner(
        self,
        forward: DeviceForward,
        caches: Iterable[LayerCache],
        facts: ModelFacts,
        size: PoolSize,
        *,
        keeps_states: bool = False,
    ) -> DeviceRunner:
        from .device.graphs import CudaGraphCapture
        from .device.runner import DeviceRunner
        from .draft.device import DraftRunner

        # The host chooses the rows of states anew for each step.
        is_graphed = self.device.type == "cuda" and self.config.cuda_graphs and not keeps_states
        runner = (DraftRunner if self.is_draft else DeviceRunner)(
            [pool for cache in caches for pool in cache.pools],
            forward,
            Sampler(facts.eos_token_ids),
            device=self.device,
            max_sampled=self.scheduler.max_live,
            max_pages=-(-size.max_model_len // self.cache.page_tokens),
            capture=CudaGraphCapture() if is_graphed else None,
            is_adapted=bool(self.adapters),
            max_proposals=0 if keeps_states else self.scheduler.num_speculative_tokens or 0,
            **self._runner_sizes(size),
        )
        runner.overlaps &= not keeps_states
        return runner

    def load_proven(self, proofs: ProofStore, run_dir: Path) -> Loaded | None:
        """Load the model on the kernels of the device if an earlier start has proven it there, otherwise return None.

        Raises:
            ConfigError: the checkpoint is damaged, or another tokenizer is being served.
        """
        on_gpu = self.device.type == "cuda" and self.config.tensor_parallel_size == 1
        why_not = self._why_not_fused() if on_gpu else self._why_not_native()
        if why_not is not None or (proof := proofs.find(run_dir)) is None:
            return None
        try:
            if not on_gpu:
                return self._native(load_proven(self.folder, proof, self._native_setting), proofs, run_dir)
            from .fused.build import load_proven as load_fused

            return self._fused(load_fused(self.folder, proof, self._fused_setting), proof.facts)
        except Unsupported:
            return None  # load_fused or load_native will say why

    def prove(self, proofs: ProofStore, run_dir: Path) -> None:
        """Prove that the model runs on the compiled kernels, unless an earlier start has or there is too little memory.

        Raises:
            ConfigError: see ``load_native``; or the running model has to leave these kernels for its first adapter.
        """
        if self._why_not_native() is not None or proofs.find(run_dir) is not None:
            return
        if len(self.adapters) == 1 and self._has_latents_without_adapters(run_dir):
            # As many pages of transformers' modules, with the keys and values of all heads, may not fit into memory.
            reason = f"the kernels that run {self.config.model} have no adapters for latent attention"
            raise ConfigError(f"{reason}; name the adapter when the pipeline starts", param="lora_modules")
        num_bytes = sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))
        if available_bytes(self.device) > PROOF_SHARE * num_bytes:
            self.with_tokenizer(run_dir).load_native(proofs, run_dir)

    def _has_latents_without_adapters(self, run_dir: Path) -> bool:
        proof = replace(self, config=replace(self.config, lora_modules=())).proofs.find(run_dir)
        return proof is not None and proof.spec.latent is not None

    def load_native(self, proofs: ProofStore, run_dir: Path) -> Loaded | None:
        """Load the model on the compiled kernels; None if transformers' modules have to serve it.

        Raises:
            ConfigError: the model cannot run on these kernels, but they were requested, by name or by a setting that
                only they support.
        """
        config = self.config
        try:
            if (why_not := self._why_not_native()) is not None:
                raise Unsupported(why_not)
            with importing(MODELS):
                from .native.proven import load_native

            native = load_native(self.folder, self._tokenizer, dtype=config.dtype, setting=self._native_setting)
        except Unsupported as error:
            if config.backend == "native" or config.quantization != "none" or config.deterministic:
                reason = f"{config.model} cannot run on the native kernels: {error}"
                raise ConfigError(reason, param="backend") from error
            if self.has_eight_bit_pages and self.device.type == "cpu":
                reason = f"kv_dtype is {self.cache.kv_dtype!r}, which only the native kernels have on a CPU: {error}"
                raise ConfigError(reason, param="kv_dtype") from error
            if config.backend == "auto" and self.device.type == "cpu":
                slower = "transformers' modules run the model, which takes 3 to 10 times as long as"
                self._refuse("the compiled kernels", error, slower)
            return None
        proofs.keep(native.proof, run_dir)
        return self._native(native, proofs, run_dir)

    def _refuse(self, backend: str, why: Unsupported, consequence: str) -> None:
        self.refusals.append(f"{backend}: {why}")
        self.obstacles.append(f"{consequence} {self.refusals[-1]}")
        logger.warning("%s", self.obstacles[-1])

    def _native(self, native: NativeModel, proofs: ProofStore, run_dir: Path) -> Loaded:
        logger.info("the compiled kernels run %s: %s", self.config.model, native.why)
        facts = native.proof.facts

        state_bytes = native.state_bytes(self.num_state_rows)
        kv_file = None if state_bytes else self.kv_file  # without the states that belong to them, pages are of no use

        def make_runner(size: PoolSize) -> NativeRunner:
            make_arena: MakeArena = Arena
            if kv_file is not None:
                key = f"{proofs.form} {digest_of_code().hex()} {native.backend} {size.max_model_len}"
                make_arena = kv_file.arenas(num_pages=size.num_pages, page_size=self.cache.page_tokens, key=key)
            decoder = native.make_decoder(size.num_pages, size.max_model_len, self.num_state_rows, make_arena)
            late = LateAdapters(proofs, run_dir, native.pack_adapter)
            runner = NativeRunner(decoder, Sampler(facts.eos_token_ids), late, **self._runner_sizes(size))
            runner.page_records = kv_file.records if kv_file is not None else None
            return runner

        return Loaded(facts, native.dtype, native.backend, native.shapes, make_runner, state_bytes=state_bytes)

    def _why_not_native(self) -> str | None:
        config = self.config
        if config.backend not in ("auto", "native"):
            return f"backend is {config.backend!r}"
        if config.tensor_parallel_size > 1:
            return f"tensor_parallel_size is {config.tensor_parallel_size}"
        return None if self.device.type == "cpu" else f"the device is {self.device}"

    @property
    def proofs(self) -> ProofStore:
        """Where the proof of this model is kept."""
        return ProofStore(self.folder, self.config, self.cache.kv_dtype, self.spare_cache, self.device)

    @property
    def _native_setting(self) -> NativeSetting:
        config = self.config
        return NativeSetting(
            quantization=config.quantization,
            kernels=config.kernels,
            spare_cache=self.spare_cache,
            page_size=self.cache.page_tokens,
            has_eight_bit_pages=self.has_eight_bit_pages,
            threads=config.threads,
            overlaps=config.overlap and num_processors() > 1,
            adapters=self.adapters,
            progress=self.progress,
            weights_file=self.weights_file,
        )

    @property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        assert self.tokenizer is not None, "the tokenizer is read first"
        return self.tokenizer

    def load_transformers(self) -> Loaded:
        """Load the model on transformers' own modules.

        Raises:
            ConfigError: the checkpoint is damaged, or its family cannot run on paged attention.
        """
        with importing(MODELS):
            from .modules.build import load_on_pages

        try:
            on_pages = load_on_pages(
                self.folder, self._tokenizer, self.config, device=self.device, group=self.group, adapters=self.adapters,
                has_eight_bit_pages=self.has_eight_bit_pages, progress=self.progress,
            )  # fmt: skip
        except ConfigError as error:
            reasons = "; nor can it run on ".join((str(error), *self.refusals))
            raise ConfigError(reasons, param=error.param) from error

        def make_runner(size: PoolSize, ranks: Ranks | None) -> StepRunner:
            return on_pages.make_runner(
                size,
                page_size=self.cache.page_tokens,
                num_state_rows=self.num_state_rows,
                sizes=self._runner_sizes(size),
                ranks=ranks,
                on_device=lambda forward, caches: self._device_runner(
                    forward, caches, on_pages.facts, size, keeps_states=on_pages.keeps_states
                ),
            )

        return Loaded(
            on_pages.facts,
            on_pages.model.dtype,
            on_pages.backend,
            list(on_pages.memory.pages.values()),
            partial(make_runner, ranks=self.ranks),
            partial(make_runner, ranks=None),
            on_pages.memory.states.num_bytes(self.num_state_rows),
        )

    @property
    def has_eight_bit_pages(self) -> bool:
        return self.cache.kv_dtype == "int8"

    @property
    def num_snapshots(self) -> int:
        """The number of states to keep for prompts with common prefixes, if the model has states."""
        if not self.cache.prefix_cache:
            return 0
        wanted = self.cache.state_snapshots
        return self.scheduler.num_rows // 2 if wanted is None else wanted

    @property
    def num_state_rows(self) -> int:
        return num_state_rows(self.scheduler.max_live, self.num_snapshots)

    def _runner_sizes(self, size: PoolSize) -> dict[str, int]:
        return {
            "prefill_tokens": self.scheduler.token_budget,
            "max_model_len": size.max_model_len,
            "decode_rows": self.scheduler.num_rows,
            "num_host_pages": self.cache.host_pages,
        }
