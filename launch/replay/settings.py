"""The settings of a simulated pipeline: those of a recorded one, but for the flags that were given."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.config import CacheConfig, SchedulerConfig
from ...protocol.errors import ConfigError
from ...workers.execute.scheduling.scheduler import Scheduler
from .options import EngineConfig
from .trace_file import malformed, read_json_lines

DEFAULT_PAGES = 4096  # where neither a flag nor a trace says how many


class Recorded(NamedTuple):
    """What the first line of a trace says of the pipeline that wrote it."""

    options: dict[str, Any]  # fields of CacheConfig and SchedulerConfig
    max_model_len: int

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """Raises ConfigError if the file is not a trace."""
        for number, line in read_json_lines(path):
            try:
                cache = {name: line[name] for name in ("page_size", "num_pages", "prefix_cache")}
                return cls({**line["scheduler"], **cache, "host_pages": line["num_host_pages"]}, line["max_model_len"])
            except (KeyError, TypeError) as error:
                raise malformed(path, number, error) from error
        raise ConfigError(f"{path} is empty", param="file")


def merge(recorded: Mapping[str, Any], config: EngineConfig, given: Collection[str]) -> EngineConfig:
    """``config`` with what was recorded in place of every field that was not given."""
    fields = {**_options(config.cache), **_options(config.scheduler)}
    return EngineConfig.from_options(**{**fields, **{k: v for k, v in recorded.items() if k not in given}})


def make_scheduler(config: EngineConfig, max_model_len: int) -> Scheduler:
    """
    Raises:
        ConfigError: it would guess tokens, and those of a simulation are made up.
    """
    if guesses := config.scheduler.num_speculative_tokens:
        raise ConfigError(f"num_speculative_tokens is {guesses}, and here it must be 0", param="num_speculative_tokens")
    cache = config.cache
    return Scheduler(
        config.scheduler,
        page_size=cache.page_size,
        num_pages=cache.num_pages or DEFAULT_PAGES,
        max_model_len=max_model_len,
        prefix_cache=cache.prefix_cache,
        num_host_pages=cache.host_pages,
    )


def _options(part: CacheConfig | SchedulerConfig) -> dict[str, Any]:
    return dataclasses.asdict(part)
