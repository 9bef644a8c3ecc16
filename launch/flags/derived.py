"""Flags derived from dataclass fields: name, default and help text are written once, beside the field.

A verb declares a parameter with a dataclass type. ``with_flags`` replaces it by one typer flag per field, each with an
environment variable ``TRIPTYCH_<NAME>``, and passes the verb the dataclass built from them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from ...protocol.config import PipelineConfig
from ...protocol.errors import ConfigError
from ...protocol.plain import type_hints
from ...protocol.sampling import SamplingParams, is_token_id
from ..bench.options import BenchOptions
from ..gateway.config import GatewayConfig
from ..replay.options import EngineConfig, StudyOptions
from .aliases import ALIASES, SHORT
from .config_file import take_defaults
from .variables import PREFIX

CONFIG_FILE = "config_file"  # the parameter of --config, which verbs do not see


class OutputFormat(str, Enum):
    """The format of written answers."""

    text = "text"
    jsonl = "jsonl"


_SAMPLING_HELP = {
    "max_tokens": "maximum length of the answer; none: until the context is full",
    "min_tokens": "until then, end-of-sequence tokens and stop strings are ignored",
    "temperature": "0 is greedy",
    "top_k": "sample only from that many likeliest tokens; 0 is off",
    "top_p": "sample only from the likeliest tokens that make up this probability",
    "min_p": "sample only from tokens at least this likely, relative to the likeliest",
    "repetition_penalty": "for tokens of prompt and output, 1 is off",
    "presence_penalty": "for tokens of the output",
    "frequency_penalty": "for tokens of the output, for each occurrence",
    "seed": "by default drawn for each request",
    "stop": "a string that ends the answer; may be given several times",
    "stop_token_ids": "a token that ends the answer; may be given several times",
    "ignore_eos": "continue after the end of sequence",
    "include_stop_str": "keep the stop string at the end of the text",
    "skip_special_tokens": "leave special tokens out of the text",
    "logprobs": "return those of the chosen token and of this many alternatives",
    "logit_bias": "TOKEN_ID=BIAS, added to the token's logit; may be given several times",
    "prompt_logprobs": "return those of each prompt token and of this many alternatives",
    "n": "choices in the answer, each sampled with a seed of its own",
    "best_of": "sample this many, and return the n likeliest",
    "num_beams": "above 1: beam search, which returns the n best hypotheses",
    "length_penalty": "a hypothesis' logprob is divided by its length to this power",
    "early_stopping": "when a beam search ends, as in transformers",
}


def option(name: str, text: str, *declarations: str, **settings: Any) -> Any:
    """A typer option for ``Annotated``, with its environment variable and, in the help text, its aliases."""
    flag = name.replace("_", "-")
    others = [f"--{alias}" for alias, own in ALIASES.items() if own in (flag, f"no-{flag}")]
    text = f"{text} (also {', '.join(others)})" if others else text
    return typer.Option(*declarations, help=text, envvar=PREFIX + name.upper(), show_envvar=False, **settings)


def number(name: str, text: str) -> Any:
    """An ``option`` that is a float."""
    return option(name, text, **_reader(float))


def with_flags(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb with a flag for every field of those parameters whose type is in ``_BUILDERS``.

    Calling it raises ConfigError or InvalidRequest if a value is out of range.
    """
    signature = inspect.signature(verb, eval_str=True)
    owners = {p.name: p.annotation for p in signature.parameters.values() if p.annotation in _BUILDERS}
    flags = {name: {flag.name: flag for flag in _flags(owner)} for name, owner in owners.items()}

    @functools.wraps(verb)
    def call(**values: Any) -> Any:
        values.pop(CONFIG_FILE, None)  # its values have already become defaults of the flags
        for name, owner in owners.items():
            own = {flag: _from_flag(values.pop(flag), hint) for flag, hint in _hints(owner).items()}
            values[name] = _BUILDERS[owner](own)
        return verb(**values)

    plain = [p for p in signature.parameters.values() if p.name not in owners]
    shown = [*plain, _config_file(), *(flag for group in flags.values() for flag in group.values())]
    shown = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in shown]
    call.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in shown}
    return call


def given_names(context: typer.Context, owner: type) -> set[str]:
    """Fields of ``owner`` that were set, on the command line or in the environment."""
    sources = {name: context.get_parameter_source(name) for name in _hints(owner)}
    return {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


def given_flags(context: typer.Context, owner: type) -> list[str]:
    """Flags of ``owner`` that were given on the command line, not in the environment."""
    sources = {name: context.get_parameter_source(name) for name in _hints(owner)}
    names = (name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
    return ["--" + name.replace("_", "-") for name in names]


def _config_file() -> inspect.Parameter:
    text = "a TOML file with values for flags, by name"
    settings = {"is_eager": True, "callback": take_defaults, "metavar": "<file>"}
    annotation = Annotated[Path | None, option("config", text, "--config", **settings)]
    return inspect.Parameter(CONFIG_FILE, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _compose(owner: type, values: Mapping[str, Any]) -> Any:
    """A dataclass of dataclasses from flat values."""
    parts = type_hints(owner).items()
    return owner(**{name: part(**{f.name: values[f.name] for f in dataclasses.fields(part)}) for name, part in parts})


_BUILDERS: dict[Any, Callable[[Mapping[str, Any]], Any]] = {
    PipelineConfig: lambda values: PipelineConfig.from_options(**values),
    EngineConfig: lambda values: EngineConfig.from_options(**values),
    SamplingParams: lambda values: SamplingParams(**values),
    GatewayConfig: lambda values: GatewayConfig(**values),
    BenchOptions: lambda values: _compose(BenchOptions, values),
    StudyOptions: lambda values: StudyOptions(**values),
}
_PANELS = {SamplingParams: "Sampling", StudyOptions: "Simulation", GatewayConfig: "HTTP"}  # owners with a single panel


def _groups(owner: type) -> Iterator[tuple[str, type]]:
    """Help panels, each with the dataclass whose fields it shows."""
    if owner in _PANELS:
        yield _PANELS[owner], owner
    else:
        yield from ((name.capitalize(), part) for name, part in type_hints(owner).items())


def _hints(owner: type) -> dict[str, Any]:
    return {name: hint for _, part in _groups(owner) for name, hint in type_hints(part).items()}


@functools.cache
def _flags(owner: type) -> tuple[inspect.Parameter, ...]:
    return tuple(
        _flag(item, type_hints(part)[item.name], panel)
        for panel, part in _groups(owner)
        for item in dataclasses.fields(part)
    )


def _flag(item: dataclasses.Field[Any], hint: Any, panel: str) -> inspect.Parameter:
    name, kind, default = item.name, hint, item.default
    declarations: list[str] = []
    settings: dict[str, Any] = {"rich_help_panel": panel}
    if hint is bool:  # only the form that changes the default
        flag = name.replace("_", "-")
        declarations, settings["show_default"] = [f" /--no-{flag}" if default else f"--{flag}"], False
    elif name in SHORT:
        declarations = ["--" + name.replace("_", "-"), SHORT[name]]
    elif get_origin(hint) is tuple:
        kind, default = list[get_args(hint)[0]], None  # type: ignore[misc]
        settings |= _reader(get_args(hint)[0], "list[{}]")
    elif get_origin(hint) is Mapping:
        kind, default = list[str], None
    elif type(None) in get_args(hint) and default is not None:
        settings |= {"parser": _integer_or_none, "metavar": "<int|none>"}
    elif set(get_args(hint)) == {bool, str}:
        kind, settings = str, settings | {"parser": _bool_or_text, "metavar": "<true|false|never>"}
    else:
        settings |= next(filter(None, map(_reader, (hint, *get_args(hint)))), {})
    text = item.metadata.get("help") or _SAMPLING_HELP[name]
    if hint is bool and default:
        text = f"do not {text}"
    annotation = Annotated[kind, option(name, text, *declarations, **settings)]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _integer_or_none(text: str) -> int | None:
    if str(text).lower() == "none":
        return None
    try:
        return _whole(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither an integer nor none") from None


def _integer(text: str) -> int:
    try:
        return _whole(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer") from None


def _whole(text: str) -> int:
    """As vLLM takes it: ``4k`` is 4000, ``4K`` is 4096."""
    number, unit = str(text)[:-1], str(text)[-1:]
    if unit and (power := "kmgt".find(unit.lower()) + 1):
        return int(number) * int((1000 if unit.islower() else 1024) ** power)
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def _reader(kind: Any, shown: str = "{}") -> dict[str, Any]:
    """Settings of a numeric option. Typer's own parsers do not say what they could not parse."""
    parser = {int: _integer, float: _number}.get(kind)
    return {"parser": parser, "metavar": f"<{shown.format(kind.__name__)}>"} if parser else {}


def _bool_or_text(text: str) -> bool | str:
    return {"true": True, "false": False}.get(str(text).lower(), text)


def _from_flag(value: Any, hint: Any) -> Any:
    if get_origin(hint) is tuple:
        return tuple(value or ())
    if get_origin(hint) is Mapping:
        return dict(_pair(text) for text in value or ())
    return value


def _pair(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    with suppress(ValueError):
        if is_token_id(token_id):
            return int(token_id), float(bias)
    raise ConfigError(f"logit_bias is {text!r}, the form is TOKEN_ID=BIAS", param="logit_bias")
