"""Sampling parameters, with every default and limit in this one place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import InvalidRequest
from .spelling import did_you_mean

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 512
MAX_SAMPLES = 64
MAX_BEAMS = 16


def _limits(default: Any, low: float, high: float, *, optional: bool = False) -> Any:
    """A numeric field with inclusive limits; its type is the default's, or int | None if ``optional``."""
    is_integer = optional or type(default) is int
    return field(default=default, metadata={"low": low, "high": high, "optional": optional, "integer": is_integer})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when they end. Validated on construction.

    Order of the filters, as in transformers' ``generate``: logit bias, penalties, min_tokens, temperature, top-k,
    top-p, min-p.

    >>> SamplingParams(max_tokens=100, temperature=0.8, seed=7).to_wire()
    {'max_tokens': 100, 'temperature': 0.8, 'seed': 7}

    Raises:
        InvalidRequest: a value has the wrong type or lies outside its limits; ``param`` names the field.
    """

    max_tokens: int | None = _limits(256, 0, 2**31 - 1, optional=True)  # None: until the context is full
    min_tokens: int = _limits(0, 0, 2**31 - 1)  # until then, end-of-sequence tokens and stop strings are ignored
    temperature: float = _limits(0.0, 0.0, 100.0)  # 0: greedy
    top_k: int | None = _limits(None, -1, 2**31 - 1, optional=True)  # None, 0 and -1: off
    top_p: float = _limits(1.0, 0.0, 1.0)  # keeps the token that crosses the threshold, so 0 keeps one
    min_p: float = _limits(0.0, 0.0, 1.0)
    repetition_penalty: float = _limits(1.0, 0.01, 100.0)  # prompt and output, 1: off (Keskar et al. 2019)
    presence_penalty: float = _limits(0.0, -2.0, 2.0)  # output only
    frequency_penalty: float = _limits(0.0, -2.0, 2.0)  # output only
    seed: int | None = _limits(None, 0, 2**63 - 1, optional=True)  # None: prepare draws one and records it
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str: bool = False  # keep the stop string at the end of the text
    skip_special_tokens: bool = True
    logprobs: int | None = _limits(None, 0, MAX_LOGPROBS, optional=True)  # None: off; k: the chosen and k alternatives
    prompt_logprobs: int | None = _limits(None, 0, MAX_LOGPROBS, optional=True)  # the same for the prompt's tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit, -100..100
    n: int = _limits(1, 1, MAX_SAMPLES)  # choices in the answer, each sampled with a seed of its own
    best_of: int | None = _limits(None, 1, MAX_SAMPLES, optional=True)  # samples; the n likeliest are returned
    num_beams: int = _limits(1, 1, MAX_BEAMS)  # above 1: beam search, which returns the n best hypotheses
    length_penalty: float = _limits(1.0, -10.0, 10.0)  # a hypothesis' logprob is divided by length ** length_penalty
    early_stopping: bool | str = False  # when a beam search ends: true, false or "never", as in transformers

    def __post_init__(self) -> None:
        for name, kind, low, high, limits in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not kind or not low <= value <= high:  # the slow path, for the exceptions
                _check_number(name, value, limits)
        for name in _BOOLS:
            _check_bool(name, getattr(self, name))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, the limit is max_tokens, {self.max_tokens}", param="min_tokens"
            )
        _check_group(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_beam_search(self) -> bool:
        return self.num_beams > 1

    @property
    def is_ranked(self) -> bool:
        """Whether the choices are known only at the end, when more candidates than choices were compared."""
        return self.is_beam_search or (self.best_of or 1) > self.n

    @property
    def group_size(self) -> int:
        """Sequences computed for this request."""
        return max(self.n, self.best_of or 1, self.num_beams)

    def to_wire(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain values."""
        wire: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value != _default(item):
                wire[item.name] = list(value) if isinstance(value, tuple) else value
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any], *, others: Iterable[str] = ()) -> SamplingParams:
        """Parameters out of a decoded map. ``others`` are names that may have been meant by an unknown field.

        Raises:
            InvalidRequest: a field is unknown, of the wrong type or outside its limits.
        """
        for name in wire:
            if name not in FIELD_NAMES:
                hint = did_you_mean(name, [*FIELD_NAMES, *others])
                raise InvalidRequest(f"unknown field {name!r:.80}{hint}", param=str(name)[:80])
        return cls(**wire)


FIELD_NAMES = frozenset(item.name for item in fields(SamplingParams))
# Precomputed: a request is validated several times on its way.
_NUMBERS = tuple(
    (item.name, int if limits["integer"] else float, limits["low"], limits["high"], limits)
    for item in fields(SamplingParams)
    if "low" in (limits := item.metadata)
)
_BOOLS = tuple(item.name for item in fields(SamplingParams) if item.type == "bool")


def _default(item: Any) -> Any:
    return {} if item.name == "logit_bias" else item.default


def _check_number(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if value is None and limits["optional"]:
        return
    if isinstance(value, bool) or not isinstance(value, int if limits["integer"] else (int, float)):
        expected = "an integer" if limits["integer"] else "a number"
        raise InvalidRequest(f"{name} must be {expected}, got {value!r:.80}", param=name)
    if not limits["low"] <= value <= limits["high"]:  # true for NaN as well
        raise InvalidRequest(f"{name} is {value}, the limits are {limits['low']} and {limits['high']}", param=name)


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {value!r:.80}", param=name)


# What a beam search, which ranks whole distributions, does not use or cannot undo.
_NOT_WITH_BEAMS = ("best_of", "temperature", "top_k", "top_p", "min_p", "stop", "logprobs", "prompt_logprobs")


def _check_group(params: SamplingParams) -> None:
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise InvalidRequest(
            f"early_stopping must be true, false or 'never', got {params.early_stopping!r:.80}", param="early_stopping"
        )
    if params.best_of is not None and params.best_of < params.n:
        raise InvalidRequest(f"best_of is {params.best_of}, the least is n, {params.n}", param="best_of")
    if not params.is_beam_search:
        return
    if params.n > params.num_beams:
        raise InvalidRequest(f"n is {params.n}, the limit is num_beams, {params.num_beams}", param="n")
    for item in fields(params):
        if item.name in _NOT_WITH_BEAMS and getattr(params, item.name) != _default(item):
            raise InvalidRequest(
                f"{item.name} is {getattr(params, item.name)!r:.80}, num_beams is {params.num_beams}:"
                f" a beam search takes no {item.name}",
                param=item.name,
            )


def _checked_stop(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise InvalidRequest(f"stop must be a string or a list of strings, got {value!r:.80}", param="stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(strings)} strings, the limit is {MAX_STOP_STRINGS}", param="stop")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"a stop string has {len(string)} characters, the limits are 1 and {MAX_STOP_CHARS}", param="stop"
            )
    return tuple(strings)


def _checked_token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(i) is int for i in value):
        raise InvalidRequest(f"stop_token_ids must be a list of integers, got {value!r:.80}", param="stop_token_ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids has {len(value)} ids, the limit is {MAX_STOP_TOKEN_IDS}", param="stop_token_ids"
        )
    for token_id in value:
        if not 0 <= token_id < 2**31:
            raise InvalidRequest(
                f"stop_token_ids holds {token_id}, the limits are 0 and {2**31 - 1}", param="stop_token_ids"
            )
    return tuple(value)


def _checked_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, (dict, Mapping)):  # dict first: the common case, and a much cheaper check
        raise InvalidRequest(f"logit_bias must map token ids to numbers, got {value!r:.80}", param="logit_bias")
    if len(value) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"logit_bias has {len(value)} entries, the limit is {MAX_LOGIT_BIASES}", param="logit_bias"
        )
    for token_id, bias in value.items():
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise InvalidRequest(f"logit_bias has the key {token_id!r:.80}, keys are token ids", param="logit_bias")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise InvalidRequest(
                f"logit_bias of token {token_id} is {bias!r:.80}, the limits are -100 and 100", param="logit_bias"
            )
    return {token_id: float(bias) for token_id, bias in value.items()}


def bias_of_json(value: Mapping[str, Any]) -> dict[Any, Any]:
    """A ``logit_bias`` of JSON, whose keys are always strings; one that is no token id is kept, and refused later."""
    return {int(key) if is_token_id(key) else key: bias for key, bias in value.items()}


def is_token_id(key: str) -> bool:
    """Whether it may be the id of a token: plain digits, where ``int`` takes signs, blanks and ``1_0`` too."""
    return key.isascii() and key.isdigit() and len(key) <= 10  # int() raises on thousands of digits
