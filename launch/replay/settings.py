"""The settings of a simulated pipeline: the recorded ones, overridden by flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.errors import ConfigError
from ...workers.execute.scheduling.scheduler import Scheduler
from .options import EngineConfig
from .trace_file import malformed, read_json_lines

DEFAULT_PAGES = 4096  # if neither a flag nor a trace gives a number


class Recorded(NamedTuple):
    """The description of the pipeline in the first line of its trace."""

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
    """``config`` with the recorded value for every field that was not given."""
    fields = {**dataclasses.asdict(config.cache), **dataclasses.asdict(config.scheduler)}
    return EngineConfig.from_options(**{**fields, **{k: v for k, v in recorded.items() if k not in given}})


def make_scheduler(config: EngineConfig, max_model_len: int) -> Scheduler:
    """
    Raises:
        ConfigError: speculation is configured, but the tokens of a simulation are made up.
    """
    if guesses := config.scheduler.num_speculative_tokens:
        raise ConfigError(f"num_speculative_tokens is {guesses}, and here it must be 0", param="num_speculative_tokens")
    cache = config.cache
    return Scheduler(
        config.scheduler,
        page_size=cache.page_tokens,
        num_pages=cache.num_pages or DEFAULT_PAGES,
        max_model_len=max_model_len,
        prefix_cache=cache.prefix_cache,
        num_host_pages=cache.host_pages,
    )
