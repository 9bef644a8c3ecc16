"""LoRA adapters that are loaded while a pipeline runs, and what is known of them once it was killed.

Their list lies beside the journal, whose requests need them: the next driver on it serves them too, beside those that
its own settings name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..protocol.config import PipelineConfig
from ..protocol.errors import ConfigError
from ..protocol.lora import PARAM, LoraModule, parse_modules
from ..protocol.plain import load_map, make
from ..protocol.private_file import write_private

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _List:
    """What is in the file."""

    model: str  # whose adapters they are
    modules: tuple[str, ...]  # NAME=PATH


class LoadedAdapters:
    """Those of a config that are not in the ``settings`` that its driver was made with."""

    def __init__(self, settings: PipelineConfig) -> None:
        self._named = frozenset(module.name for module in settings.model.adapters)

    def restore(self, journal: Path, config: PipelineConfig) -> PipelineConfig:
        """The config with all that an earlier driver on the journal has loaded and that can still be read.

        Raises:
            ConfigError: their list is damaged.
        """
        known = {module.name for module in config.model.adapters}
        kept = [module for module in _read(_list_of(journal), config.model.model) if module.name not in known]
        return _with_adapters(config, (*config.model.adapters, *filter(_is_readable, kept)))

    def keep(self, journal: Path, config: PipelineConfig) -> None:
        """Remember for the next driver what is loaded."""
        modules = tuple(str(module) for module in config.model.adapters if module.name not in self._named)
        if modules:
            text = json.dumps(asdict(_List(config.model.model, modules)))
            write_private(_list_of(journal), text, is_durable=True)
        else:
            _list_of(journal).unlink(missing_ok=True)

    def add(self, config: PipelineConfig, name: str, folder: str | Path) -> PipelineConfig:
        """
        Raises:
            ConfigError: there is one of this name, or this is no name, or there are too many.
        """
        if name in (module.name for module in config.model.adapters):
            raise ConfigError(f"the adapter {name!r} is loaded already", param=PARAM)
        return _with_adapters(config, (*config.model.adapters, LoraModule(name, Path(folder).absolute())))

    def remove(self, config: PipelineConfig, name: str) -> PipelineConfig:
        """
        Raises:
            ConfigError: it is not loaded, or it is one of the settings.
        """
        if name in self._named:
            raise ConfigError(f"the adapter {name!r} is one of the settings, which stay", param=PARAM)
        modules = [module for module in config.model.adapters if module.name != name]
        if len(modules) == len(config.model.adapters):
            known = ", ".join(module.name for module in modules) or "none"
            raise ConfigError(f"the adapter {name!r:.200} is not loaded, known are: {known}", param=PARAM)
        return _with_adapters(config, modules)


def _with_adapters(config: PipelineConfig, modules: Iterable[LoraModule]) -> PipelineConfig:
    return replace(config, model=replace(config.model, lora_modules=tuple(map(str, modules))))


def _list_of(journal: Path) -> Path:
    return journal.with_name(f"{journal.name}.adapters")


def _read(path: Path, model: str) -> tuple[LoraModule, ...]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    kept = make(_List, load_map(text, str(path)), str(path))
    return parse_modules(kept.modules) if kept.model == model else ()


def _is_readable(module: LoraModule) -> bool:
    try:
        module.digest()
    except ConfigError as error:
        logger.warning("%s, so it is not loaded again", error.message)
        return False
    return True
