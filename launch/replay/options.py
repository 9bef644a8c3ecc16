"""The options of ``triptych replay``, as dataclasses that flags are derived from."""

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
    """What to simulate, and the cost of a step."""

    verify: bool = _flag(False, "compare every plan of the trace with the one made now, without simulating")
    requests: int | None = _flag(None, "without a file: draw this many requests at random", low=1)
    rate: float | None = _flag(None, "arrivals of these per second on average; by default all at once", low=1e-6)
    prompt_tokens: str = _flag("256", f"for each of these: {LENGTHS}")
    output_tokens: str = _flag("128", f"for each of these: {LENGTHS}")
    prefixes: int = _flag(0, "each prompt begins with one of this many prefixes", low=0)
    prefix_tokens: int = _flag(0, "length of each prefix", low=0)
    seed: int = _flag(0, "seed of everything drawn at random", low=0)
    speed: float = _flag(1.0, "2 is twice as many arrivals per second as in the file", low=1e-6)
    replicas: int = _flag(1, "pipelines that share the requests", low=1)
    router: str = _flag("least_queue", "assigns requests to pipelines: round_robin, least_queue or prefix_affinity")
    max_model_len: int | None = _flag(None, "tokens of prompt and output; by default the trace's, or any number", low=2)
    cost_from: str | None = _flag(None, "a trace to which the cost of a step is fitted; by default FILE, if it is one")
    step_ms: float | None = _flag(None, "fixed cost of a step, instead of fitted costs", low=0.0)
    prefill_token_us: float = _flag(0.0, "additional cost of each prompt token", low=0.0)
    decode_us: float = _flag(0.0, "additional cost of each decoding sequence", low=0.0)
    read_ns: float = _flag(0.0, "additional cost of each token of context", low=0.0)

    def __post_init__(self) -> None:
        for item in self.__dataclass_fields__.values():
            value, low = getattr(self, item.name), item.metadata["low"]
            if low is not None and value is not None and not low <= value < math.inf:
                raise ConfigError(f"{item.name} is {value}, the least is {low}", param=item.name)
        if self.step_ms is None and (self.prefill_token_us or self.decode_us or self.read_ns):
            raise ConfigError("the other costs need step_ms: they are not combined with fitted ones", param="step_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The part of a pipeline's config that determines schedules."""

    cache: CacheConfig
    scheduler: SchedulerConfig

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        config = PipelineConfig.from_options(**options)
        return cls(cache=config.cache, scheduler=config.scheduler)
