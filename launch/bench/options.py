"""The options of ``triptych bench``. Each field becomes a flag."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from ...protocol.errors import ConfigError
from ...protocol.settings import between, one_of, option

ENDPOINTS = ("completions", "chat")
ARRIVALS = ("poisson", "fixed")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A uniform distribution of lengths in tokens, from ``low`` to ``high`` inclusive."""

    low: int
    high: int

    @classmethod
    def parse(cls, name: str, text: str) -> Lengths:
        """From ``128`` or ``64..256``.

        Raises:
            ConfigError: it has neither form, or the limits are out of order.
        """
        low, _, high = text.partition("..")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            raise ConfigError(f"{name} is {text!r}, the forms are 128 and 64..256", param=name) from None
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"{name} is {text!r}, the limits must be ascending and at least 1", param=name)
        return lengths

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """The HTTP server to measure; without a URL, a pipeline is measured."""

    url: str | None = option(None, "an OpenAI-compatible server: http://127.0.0.1:8000; by default a pipeline")
    endpoint: str = option("completions", f"with --url: {' or '.join(ENDPOINTS)}")
    served_model: str | None = option(None, "with --url: the model to request; by default the server's first one")
    api_key: str | None = option(None, "with --url: sent as the bearer token")

    def __post_init__(self) -> None:
        one_of("endpoint", self.endpoint, ENDPOINTS)
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {self.url!r}, it must begin with http:// or https://", param="url")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """When requests arrive."""

    num_prompts: int = option(100, "measured requests")
    request_rate: float | None = option(None, "arrivals per second, whatever has ended; by default all arrive at once")
    arrival: str = option("poisson", f"{' or '.join(ARRIVALS)}: how arrivals at a rate are spaced")
    max_concurrency: int | None = option(None, "requests in flight at once; time spent waiting for that counts")
    num_warmups: int = option(2, "requests sent first, which are not measured")
    load_seed: int = option(0, "seed of arrivals, lengths and prompts")

    def __post_init__(self) -> None:
        one_of("arrival", self.arrival, ARRIVALS)
        between("num_prompts", self.num_prompts, 1)
        between("request_rate", self.request_rate, 1e-3)
        between("max_concurrency", self.max_concurrency, 1)
        between("num_warmups", self.num_warmups, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What is sent."""

    dataset: str | None = option(None, "a file of prompts, as for generate; by default they are random")
    input_len: str = option("128", "tokens of a random prompt after the shared prefix: 128, or 64..256")
    shared_prefix: int = option(0, "tokens that all random prompts begin with")
    output_len: str = option("64", "tokens of an answer: 64, or 16..256")
    temperature: float = option(0.0, "0 is greedy")
    ignore_eos: bool = option(True, "send ignore_eos, which gives answers their full length; some servers refuse it")

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len"):
            Lengths.parse(name, getattr(self, name))
        between("shared_prefix", self.shared_prefix, 0)
        between("temperature", self.temperature, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What is reported."""

    ttft_target_ms: float | None = option(None, "for goodput: the latest time of a first token; see --itl-target-ms")
    output: str | None = option(None, "a JSON file for the results and every request")
    plot: str | None = option(None, "a PNG, SVG or PDF file for plots; needs matplotlib")

    def __post_init__(self) -> None:
        between("ttft_target_ms", self.ttft_target_ms, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """All options of a benchmark, except those of a pipeline started for it."""

    target: TargetOptions = field(default_factory=TargetOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    prompts: PromptOptions = field(default_factory=PromptOptions)
    report: ReportOptions = field(default_factory=ReportOptions)
