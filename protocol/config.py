"""Settings: frozen dataclasses, one per owner, checked when made and never changed afterwards.

What is only known at run time (the number of pages, the model's context) is in ``model_card``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .lora import LoraModule, parse_modules
from .plain import checked, load_map, make, type_hints
from .service_config import ServiceConfig as ServiceConfig
from .settings import between, one_of, option, require
from .spelling import did_you_mean

POLICIES = ("fifo", "prefill_first", "round_robin", "priority")
PREEMPTIONS = ("auto", "recompute", "swap")
RECOVERIES = ("auto", "exact", "fast")
DTYPES = ("auto", "float32", "bfloat16", "float16")
BACKENDS = ("auto", "fused", "native", "transformers")
KV_DTYPES = ("auto", "model", "int8")
QUANTIZATIONS = ("none", "int8", "int4", "fp8")
DEVICES = ("auto", "cpu", "cuda")
CPU_NUM_SEQS, GPU_NUM_SEQS = 32, 256
CPU_PREFILL_CHUNK, GPU_PREFILL_CHUNK = 512, 2048  # a GPU takes as long to launch 512 tokens as to compute them
CPU_KV_FRACTION, GPU_KV_FRACTION = 0.5, 0.9  # a CPU shares its memory with everything else on the machine
CPU_PAGE_SIZE, GPU_PAGE_SIZE = 16, 64  # a GPU looks up a page once for all keys of a tile, if they lie in one
DEMO_MODEL = "demo"  # the checkpoint that ships with the package
DEMO_CHECKPOINT = Path(__file__).parent.parent / "launch" / "demo_model" / "checkpoint"
_DEVICE = re.compile(r"cuda:[0-9]{1,3}")
HASH_MODEL = "hash-lm"  # no weights: a hash of the whole context, for testing everything around a model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and in which form."""

    model: str = option(
        DEMO_MODEL, "a local directory, a GGUF file, a hub id, demo (ships with Triptych), or hash-lm (no weights)"
    )
    dtype: str = option(
        "auto",
        f"{', '.join(DTYPES)}; auto is the checkpoint's own; bfloat16 for GGUF files, and float16 on the CPU kernels",
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N; auto is cuda if available")
    backend: str = option(
        "auto",
        "native (compiled kernels, CPU), fused (Triton kernels, GPU), transformers, or auto: the fastest that works",
    )
    kernels: str = option(
        "auto", "instructions that the compiled kernels use, such as avx512; auto is the fastest level of the processor"
    )
    quantization: str = option(
        "none", "none, int8 or int4 (native only; int4 has 4-bit weights and 8-bit activations) or fp8 (fused only)"
    )
    deterministic: bool = option(
        False, "answers do not depend on batching, chunking, preemptions or crashes, in any dtype; costs speed"
    )
    cuda_graphs: bool = option(True, "run steps as CUDA graphs on a GPU")
    overlap: bool = option(True, "plan and launch a step while the previous one runs (GPU, compiled kernels)")
    max_model_len: int | None = option(None, "tokens of prompt and output together; by default the model's own limit")
    lora_modules: tuple[str, ...] = option(
        (), "NAME=PATH of a LoRA adapter, which requests select by its name; may be given several times"
    )
    draft_model: str | None = option(
        None, "a smaller model with the same tokenizer that proposes tokens, specified like model (native or fused)"
    )
    threads: int | None = option(
        None, "CPU threads of execute, per rank; by default one per physical core, divided among the ranks"
    )
    tensor_parallel_size: int = option(1, "processes, one per GPU, that share each layer of the model on this machine")
    hash_step_ms: float = option(0.0, f"{HASH_MODEL} only: simulated cost of a step, in ms")
    hash_token_us: float = option(0.0, f"{HASH_MODEL} only: simulated cost of each token of a step, in us")

    def __post_init__(self) -> None:
        require(bool(self.model), "model", "is empty")
        one_of("dtype", self.dtype, DTYPES)
        require(
            self.device in DEVICES or _DEVICE.fullmatch(self.device) is not None,
            "device",
            f"is {self.device!r}, known are: {', '.join(DEVICES)}, cuda:N",
        )
        one_of("backend", self.backend, BACKENDS)
        require(bool(self.kernels), "kernels", "is empty")
        one_of("quantization", self.quantization, QUANTIZATIONS)
        between("max_model_len", self.max_model_len, 2)
        between("threads", self.threads, 1, 4096)
        parse_modules(self.lora_modules)
        if self.draft_model is not None:
            require(bool(self.draft_model), "draft_model", "is empty")
            has_weights = HASH_MODEL not in (self.model, self.draft_model)
            why = f"is {self.draft_model!r}, and {HASH_MODEL} has no weights to guess with"
            require(has_weights, "draft_model", why)
        between("tensor_parallel_size", self.tensor_parallel_size, 1, 64)
        require(
            self.model != HASH_MODEL or self.tensor_parallel_size == 1,
            "tensor_parallel_size",
            f"is {self.tensor_parallel_size}, {HASH_MODEL} has no layers to share",
        )
        between("hash_step_ms", self.hash_step_ms, 0, 60_000)
        between("hash_token_us", self.hash_token_us, 0, 1_000_000)

    @property
    def adapters(self) -> tuple[LoraModule, ...]:
        """``lora_modules``, parsed."""
        return parse_modules(self.lora_modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    page_size: int | None = option(
        None, f"tokens per KV page, a power of two; by default {CPU_PAGE_SIZE} on a CPU, {GPU_PAGE_SIZE} on a GPU"
    )
    num_pages: int | None = option(None, "KV pages; by default as many as the memory allows")
    kv_dtype: str = option(
        "auto",
        "dtype of keys and values: model is the model's own, int8 takes half the memory; auto is int8 on a CPU with "
        "weights quantised to int8 or int4, otherwise model",
    )
    kv_memory_fraction: float | None = option(
        None,
        "share of the memory left after loading the weights that KV pages may use; by default "
        f"{CPU_KV_FRACTION} on a CPU, {GPU_KV_FRACTION} on a GPU",
    )
    prefix_cache: bool = option(True, "share the pages of equal prefixes")
    retain_kv: bool = option(True, "on a CPU, KV pages outlive execute, unless it died by its own fault")
    host_pages: int = option(0, "KV pages in host memory, for swapped-out and evicted ones")
    state_snapshots: int | None = option(
        None, "states of recurrent layers kept for prompts with a common prefix; by default half of max_num_seqs"
    )
    max_kv_bytes: int = option(4 << 30, "upper limit for KV memory on a CPU")

    def __post_init__(self) -> None:
        one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        is_page = 1 <= self.page_tokens <= 4096 and self.page_tokens & (self.page_tokens - 1) == 0
        require(is_page, "page_size", f"is {self.page_size}, it must be a power of two from 1 to 4096")
        between("num_pages", self.num_pages, 2, 2**31 - 1)
        require(
            self.kv_memory_fraction is None or 0 < self.kv_memory_fraction <= 1,
            "kv_memory_fraction",
            f"is {self.kv_memory_fraction}, the limits are above 0 and 1",
        )
        between("host_pages", self.host_pages, 0, 2**31 - 1)
        between("state_snapshots", self.state_snapshots, 0, 2**20)
        between("max_kv_bytes", self.max_kv_bytes, 1 << 20)

    def for_device(self, device: str, *, quantization: str = "none") -> CacheConfig:
        """The same, with the defaults of a device of this type, and of such weights, for what was not set."""
        is_rounded = device == "cpu" and quantization in ("int8", "int4")
        found = self
        if self.kv_dtype == "auto":
            found = replace(self, kv_dtype="int8" if is_rounded else "model")
        if device == "cpu":
            return found
        return replace(
            found,
            page_size=GPU_PAGE_SIZE if self.page_size is None else self.page_size,
            kv_memory_fraction=self.kv_memory_fraction or GPU_KV_FRACTION,
        )

    @property
    def page_tokens(self) -> int:
        """``page_size``; unless it was set, that of a CPU."""
        return CPU_PAGE_SIZE if self.page_size is None else self.page_size

    @property
    def memory_fraction(self) -> float:
        """``kv_memory_fraction``; unless it was set, that of a CPU."""
        return self.kv_memory_fraction or CPU_KV_FRACTION


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What a step may contain."""

    max_num_seqs: int | None = option(
        None, f"rows of a decode batch; by default {CPU_NUM_SEQS} on a CPU, {GPU_NUM_SEQS} on a GPU"
    )
    prefill_chunk: int | None = option(
        None,
        "maximum tokens of one prompt in one step; by default "
        f"{CPU_PREFILL_CHUNK} on a CPU, {GPU_PREFILL_CHUNK} on a GPU",
    )
    mixed_prefill_tokens: int | None = option(
        None, "maximum prompt tokens in a step with decodes; by default 128 on a CPU, otherwise unlimited"
    )
    max_num_batched_tokens: int | None = option(
        None, "maximum tokens of a step; by default prefill_chunk + max_num_seqs"
    )
    max_kv_reads: int | None = option(None, "maximum tokens of context read by a step; by default unlimited")
    policy: str = option("fifo", f"which requests run next: {', '.join(POLICIES)}")
    priority_ageing: int = option(64, "policy priority only: later arrivals that outweigh one level of priority")
    safety_margin: float | None = option(
        None, "fraction of the pages that a new prompt must leave free while others run; by default set by the policy"
    )
    max_prefill_skip: int = option(8, "steps that may skip a waiting prompt for which there is memory")
    max_decode_skip: int = option(8, "consecutive steps that may skip the decodes")
    preemption: str = option(
        "auto", f"{', '.join(PREEMPTIONS)}: handling of preempted keys and values; auto swaps those of long sequences"
    )
    recovery: str = option(
        "auto",
        "after a crash or a preemption: exact replays the output, fast prefills it; auto is exact if that is free",
    )
    num_speculative_tokens: int | None = option(
        None,
        "maximum tokens that a step proposes and verifies per answer, found in the answer and its prompt or, with "
        "draft_model, generated by that; by default 4 with draft_model, otherwise 0",
    )
    decode_join_fill: float = option(0.0, "decodes join a step with prompts only above this share of occupied rows")
    itl_target_ms: float | None = option(None, "target time between tokens; prompts are cut into chunks that meet it")
    trace: str | None = option(None, "a file for one JSON line per step: which sequences ran, and how long it took")
    skip_ahead: int = option(0, "waiting prompts that may be tried instead of one that does not fit")

    def __post_init__(self) -> None:
        between("max_num_seqs", self.max_num_seqs, 1, 65_536)
        between("prefill_chunk", self.prefill_chunk, 1, 1 << 20)
        between("mixed_prefill_tokens", self.mixed_prefill_tokens, 1, 1 << 20)
        between("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        between("max_kv_reads", self.max_kv_reads, 1)
        one_of("policy", self.policy, POLICIES)
        between("priority_ageing", self.priority_ageing, 1, 1 << 20)
        between("safety_margin", self.safety_margin, 0, 1)
        between("max_prefill_skip", self.max_prefill_skip, 1, 1 << 20)
        between("max_decode_skip", self.max_decode_skip, 1, 1 << 20)
        one_of("preemption", self.preemption, PREEMPTIONS)
        one_of("recovery", self.recovery, RECOVERIES)
        between("num_speculative_tokens", self.num_speculative_tokens, 0, 15)
        require(self.trace != "", "trace", "is empty")
        if self.num_speculative_tokens and self.trace is not None:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, and with trace it must be 0: "
                "a trace has no tokens to guess from",
                param="num_speculative_tokens",
            )
        between("decode_join_fill", self.decode_join_fill, 0, 1)
        between("itl_target_ms", self.itl_target_ms, 0.1, 60_000)
        between("skip_ahead", self.skip_ahead, 0, 1 << 20)

    def for_device(self, device: str) -> SchedulerConfig:
        """The same, with the defaults of a device of this type for what was not set."""
        if device == "cpu":
            return self
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or GPU_NUM_SEQS,
            prefill_chunk=self.prefill_chunk or GPU_PREFILL_CHUNK,
        )

    @property
    def num_rows(self) -> int:
        """``max_num_seqs``; unless it was set, that of a CPU."""
        return self.max_num_seqs or CPU_NUM_SEQS

    @property
    def chunk_tokens(self) -> int:
        """``prefill_chunk``; unless it was set, that of a CPU."""
        return self.prefill_chunk or CPU_PREFILL_CHUNK

    @property
    def token_budget(self) -> int:
        return self.max_num_batched_tokens or self.chunk_tokens + self.num_rows

    @property
    def arrivals_per_level(self) -> int:
        """Later arrivals that outweigh one level of priority; 0 if the policy ignores priorities."""
        return self.priority_ageing if self.policy == "priority" else 0

    @property
    def max_live(self) -> int:
        """Sequences that execute may hold at once: one per row, and half as many again prefilled ahead."""
        return max(self.num_rows + 1, 3 * self.num_rows // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """When a worker counts as dead, and how often it is restarted."""

    start_timeout_s: float = option(600.0, "time limit until every worker is ready")
    hang_s: float = option(3.0, "time without progress before a worker is killed; never less than 20 steps")
    degrade_after: int = option(5, "crashes of execute within restart_window_s before it runs one sequence at a time")
    max_restarts: int = option(10, "crashes of one worker within restart_window_s before the driver gives up")
    fork_workers: bool = option(
        True, "fork workers from a process that has done their imports, which are most of a start"
    )
    restart_window_s: float = option(60.0, "time over which crashes are counted")

    def __post_init__(self) -> None:
        between("start_timeout_s", self.start_timeout_s, 0.1)
        between("hang_s", self.hang_s, 0.1)
        between("degrade_after", self.degrade_after, 0)
        between("max_restarts", self.max_restarts, 0)
        between("restart_window_s", self.restart_window_s, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Everything a pipeline is started with.

    >>> config = PipelineConfig.from_options(model="demo", max_num_seqs=8)
    >>> config.scheduler.max_num_seqs
    8
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)

    def __post_init__(self) -> None:
        draft_model = self.model.draft_model
        if draft_model is None:
            return
        if self.scheduler.num_speculative_tokens == 0:
            raise ConfigError(
                f"num_speculative_tokens is 0, and with draft_model {draft_model!r} the limits are 1 and 15",
                param="num_speculative_tokens",
            )
        if self.scheduler.trace is not None:
            raise ConfigError(
                f"draft_model is {draft_model!r}, and with trace there is none: a trace has no tokens to guess from",
                param="draft_model",
            )

    @classmethod
    def from_options(cls, **options: Any) -> PipelineConfig:
        """A config from flat options: ``from_options(model="demo", page_size=16)``.

        Raises:
            ConfigError: an option is unknown, or a value has the wrong type or is out of range.
        """
        parts: dict[str, dict[str, Any]] = {}
        hints = type_hints(cls)
        for name, value in options.items():
            owner = _owner(name)
            hint = type_hints(hints[owner])[name]
            if isinstance(value, os.PathLike):
                value = os.fspath(value)
            # As strict as the workers, which read it from JSON: an error there would come too late for the caller.
            parts.setdefault(owner, {})[name] = checked(list(value) if isinstance(value, tuple) else value, hint, name)
        return cls(**{owner: hints[owner](**values) for owner, values in parts.items()})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> PipelineConfig:
        """
        Raises:
            ConfigError: the text was not written by ``to_json``, or a value is out of range.
        """
        parts, hints = load_map(text, "the configuration"), type_hints(cls)
        for name in parts:
            if name not in hints:
                raise ConfigError(f"the configuration has the unknown part {name!r:.100}")
        return cls(**{name: make(hints[name], values, name) for name, values in parts.items()})


def _owner(option: str) -> str:
    for part, hint in type_hints(PipelineConfig).items():
        if option in hint.__dataclass_fields__:
            return part
    known = sorted(f for hint in type_hints(PipelineConfig).values() for f in hint.__dataclass_fields__)
    hint = did_you_mean(option, known) or f", known are: {', '.join(known)}"
    raise ConfigError(f"unknown option {option!r}{hint}", param=option)
