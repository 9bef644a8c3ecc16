"""The flags of ``triptych replay``, as dataclasses whose fields they are made from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ...protocol.config import CacheConfig, PipelineConfig, SchedulerConfig
from ...protocol.errors import ConfigError

LENGTHS = "200, 50-400, exp:MEAN or lognormal:MEDIAN:SIGMA"


def _flag(default: Any, text: str, *, low: float | None = None) -> Any:
    return field(default=default, metadata={"help": text, "low": low})


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """What to simulate, and at what cost."""

    verify: bool = _flag(False, "compare every plan of the trace with what would be planned now, and simulate nothing")
    requests: int | None = _flag(None, "without a file: number of random requests", low=1)
    rate: float | None = _flag(None, "their mean arrivals per second; by default all at once", low=1e-6)
    prompt_tokens: str = _flag("256", f"prompt tokens of each: {LENGTHS}")
    output_tokens: str = _flag("128", f"output tokens of each: {LENGTHS}")
    prefixes: int = _flag(0, "number of shared prefixes, one of which precedes each prompt", low=0)
    prefix_tokens: int = _flag(0, "tokens of each prefix", low=0)
    seed: int = _flag(0, "seed of everything random", low=0)
    speed: float = _flag(1.0, "factor on the arrival rate of the file; 2 is twice as fast", low=1e-6)
    replicas: int = _flag(1, "number of pipelines that share the requests", low=1)
    router: str = _flag("least_queue", "how requests are routed: round_robin, least_queue or prefix_affinity")
    max_model_len: int | None = _flag(
        None, "maximum tokens of prompt and output; by default the trace's, or unlimited", low=2
    )
    cost_from: str | None = _flag(None, "trace to fit the cost of a step to; by default FILE, if it is a trace")
    step_ms: float | None = _flag(None, "cost of a step, instead of the recorded cost", low=0.0)
    prefill_token_us: float = _flag(0.0, "added cost of each prompt token", low=0.0)
    decode_us: float = _flag(0.0, "added cost of each decoding sequence", low=0.0)
    read_ns: float = _flag(0.0, "added cost of each token of their context", low=0.0)

    def __post_init__(self) -> None:
        for item in self.__dataclass_fields__.values():
            value, low = getattr(self, item.name), item.metadata["low"]
            if low is not None and value is not None and not low <= value < math.inf:
                raise ConfigError(f"{item.name} is {value}, the least is {low}", param=item.name)
        if self.step_ms is None and (self.prefill_token_us or self.decode_us or self.read_ns):
            raise ConfigError("the other costs need step_ms: they are not mixed with recorded ones", param="step_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The part of a pipeline's config that decides schedules."""

    cache: CacheConfig
    scheduler: SchedulerConfig

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        config = PipelineConfig.from_options(**options)
        return cls(cache=config.cache, scheduler=config.scheduler)
