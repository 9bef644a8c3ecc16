"""The requests of a simulation: from a file of arrivals, or drawn from distributions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...protocol.arrays import Int32
from ...protocol.errors import ConfigError
from .options import LENGTHS
from .trace_file import malformed, read_json_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request: when it arrives, its lengths, and its prefix."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    tokens: Int32 | None = None  # prompt and output; None: made up, with equal prefixes where required
    prefix: int = 0  # requests with the same one begin with the same tokens
    num_prefix_tokens: int = 0
    cache_salt: str = ""
    priority: int = 0
    deadline_ms: float | None = None
    max_queue_ms: float | None = None

    def make_tokens(self, index: int) -> Int32:
        """int32 [prompt + output] of request number ``index``."""
        if self.tokens is not None:
            return self.tokens.copy()
        tokens = np.full(self.num_prompt_tokens + self.num_output_tokens, index + 1, np.int32)
        tokens[: self.num_prefix_tokens] = -1 - self.prefix  # distinct from all other tokens
        return tokens


# -- a file of arrivals


_FIELDS = {
    "t_s": (float, 0.0), "prompt_tokens": (int, 1), "output_tokens": (int, 1), "prefix_tokens": (int, 0),
    "priority": (int, -1000), "deadline_ms": (float, 0.0), "max_queue_ms": (float, 0.0),
}  # fmt: skip


def arrivals_of_file(path: Path) -> list[Arrival]:
    """One request per line: ``{"t_s": 0.5, "prompt_tokens": 100, "output_tokens": 20}``, with optional further fields.

    Raises:
        ConfigError: a line has an unknown, missing or invalid field.
    """
    prefixes: dict[str, int] = {}
    arrivals = []
    for number, line in read_json_lines(path):
        try:
            arrivals.append(_parse(line, prefixes))
        except (KeyError, ValueError) as error:
            raise malformed(path, number, error) from error
    if not arrivals:
        raise ConfigError(f"{path} has no requests", param="file")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _parse(line: dict[str, Any], prefixes: dict[str, int]) -> Arrival:
    for name in line.keys() - _FIELDS.keys() - {"prefix", "cache_salt"}:
        raise ValueError(f"unknown field {name!r}, known are: {', '.join([*_FIELDS, 'prefix', 'cache_salt'])}")
    for name, (kind, low) in _FIELDS.items():
        value = line.get(name, low)
        if type(value) not in (int, kind) or not low <= value < math.inf:
            raise ValueError(f"{name} is {value!r:.80}, the least is {low}")
    num_prefix_tokens = line.get("prefix_tokens", 0)
    if ("prefix" in line) != (num_prefix_tokens > 0) or num_prefix_tokens > line["prompt_tokens"]:
        raise ValueError(f"prefix and prefix_tokens go together, the limit is prompt_tokens, {line['prompt_tokens']}")
    return Arrival(
        at_s=float(line["t_s"]),
        num_prompt_tokens=line["prompt_tokens"],
        num_output_tokens=line["output_tokens"],
        prefix=prefixes.setdefault(str(line.get("prefix")), len(prefixes)),
        num_prefix_tokens=num_prefix_tokens,
        cache_salt=str(line.get("cache_salt", "")),
        priority=line.get("priority", 0),
        deadline_ms=line.get("deadline_ms"),
        max_queue_ms=line.get("max_queue_ms"),
    )


# -- drawn


Lengths = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Random requests, all with lengths from the same distributions."""

    num_requests: int
    rate: float | None  # arrivals per second on average; None: all at once
    prompt_tokens: Lengths
    output_tokens: Lengths
    num_prefixes: int = 0  # each request begins with one of them
    num_prefix_tokens: int = 0  # in front of its own tokens
    seed: int = 0


def draw_arrivals(spec: Synthetic) -> list[Arrival]:
    """A Poisson process of requests, determined by the seed."""
    rng, at_s, arrivals = random.Random(spec.seed), 0.0, []
    num_prefix_tokens = spec.num_prefix_tokens if spec.num_prefixes else 0
    for _ in range(spec.num_requests):
        at_s += rng.expovariate(spec.rate) if spec.rate else 0.0
        arrivals.append(
            Arrival(
                at_s=at_s,
                num_prompt_tokens=num_prefix_tokens + spec.prompt_tokens(rng),
                num_output_tokens=spec.output_tokens(rng),
                prefix=rng.randrange(spec.num_prefixes) if num_prefix_tokens else 0,
                num_prefix_tokens=num_prefix_tokens,
            )
        )
    return arrivals


def parse_lengths(name: str, text: str) -> Lengths:
    """``200``, ``50-400`` (uniform), ``exp:200`` (its mean), ``lognormal:200:0.8`` (its median and sigma).

    Raises:
        ConfigError: it has none of these forms.
    """
    kind, *numbers = text.split(":") if ":" in text else ("", *text.split("-"))
    try:
        match kind, numbers:
            case "", [low]:
                return _uniform(int(low), int(low))
            case "", [low, high]:
                return _uniform(int(low), int(high))
            case "exp", [mean]:
                return _exponential(_positive(mean))
            case "lognormal", [median, sigma]:
                return _lognormal(_positive(median), _positive(sigma))
    except ValueError:
        pass
    raise ConfigError(f"{name} is {text!r}, the forms are {LENGTHS}", param=name)


def _positive(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise ValueError(f"{text} is not positive")
    return float(text)


def _uniform(low: int, high: int) -> Lengths:
    if not 1 <= low <= high:
        raise ValueError(f"{low} to {high} are not lengths")
    return lambda rng: rng.randint(low, high)


def _exponential(mean: float) -> Lengths:
    return _at_least_one(lambda rng: rng.expovariate(1 / mean))


def _lognormal(median: float, sigma: float) -> Lengths:
    return _at_least_one(lambda rng: rng.lognormvariate(math.log(median), sigma))


def _at_least_one(draw: Callable[[random.Random], float]) -> Lengths:
    return lambda rng: max(1, round(draw(rng)))


def faster(arrivals: Iterable[Arrival], speed: float) -> list[Arrival]:
    """The same requests, with arrivals ``speed`` times as frequent."""
    return [replace(arrival, at_s=arrival.at_s / speed) for arrival in arrivals]
