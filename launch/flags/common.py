"""Flags that several verbs have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ...protocol.config import PipelineConfig
from ...protocol.errors import ConfigError
from .derived import given_flags, option

ModelName = Annotated[str | None, typer.Argument(metavar="MODEL", help="the same as --model")]
RunDir = Annotated[Path | None, option("run_dir", "for sockets, journal and logs; by default a private temporary one")]
Connect = Annotated[Path | None, option("connect", "use the pipeline that runs in this run directory")]
Lora = Annotated[str, option("lora", "name of the adapter that answers; by default the base model")]
LogLevel = Annotated[str, option("log_level", "debug, info, warning or error")]
Prompts = Annotated[
    list[str] | None, typer.Argument(metavar="PROMPTS", help="by default the lines of --file, or of stdin")
]
PromptFile = Annotated[Path | None, option("file", "one prompt or JSON object per line; - is stdin", "--file", "-f")]
Output = Annotated[Path | None, option("output", "overwritten if it exists; by default stdout", "--output", "-o")]
Resume = Annotated[bool, option("resume", "keep the answers in --output and add the missing ones", "--resume")]


def refuse_config_flags(context: typer.Context, connect: Path | str | None, *, allowed: tuple[str, ...] = ()) -> None:
    """Flags of a pipeline make no sense with ``connect``, where one already runs with a config of its own."""
    flags = [flag for flag in given_flags(context, PipelineConfig) if flag not in allowed]
    if connect is not None and flags:
        raise ConfigError(f"{', '.join(flags)}: the pipeline at {connect} is already running", param="connect")


def with_model(config: PipelineConfig, name: str | None) -> PipelineConfig:
    """The config with the model that was named as an argument, if one was."""
    return config if name is None else replace(config, model=replace(config.model, model=name))
