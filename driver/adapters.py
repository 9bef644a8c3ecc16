"""LoRA adapters loaded while a pipeline runs, and how they survive a killed driver.

Their list lies beside the journal, whose requests need them: the next driver on that journal serves them too, in
addition to those in its own settings.
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
    """The content of the file."""

    model: str  # the model the adapters belong to
    modules: tuple[str, ...]  # NAME=PATH


class LoadedAdapters:
    """The adapters of a config that are not in the ``settings`` its driver was created with."""

    def __init__(self, settings: PipelineConfig) -> None:
        self._named = frozenset(module.name for module in settings.model.adapters)

    def restore(self, journal: Path, config: PipelineConfig) -> PipelineConfig:
        """The config, extended by the adapters an earlier driver on the journal had loaded and that are still readable.

        Raises:
            ConfigError: their list is damaged.
        """
        known = {module.name for module in config.model.adapters}
        kept = [module for module in _read(_list_of(journal), config.model.model) if module.name not in known]
        return _with_adapters(config, (*config.model.adapters, *filter(_is_readable, kept)))

    def keep(self, journal: Path, config: PipelineConfig) -> None:
        """Save the list of loaded adapters for the next driver."""
        modules = tuple(str(module) for module in config.model.adapters if module.name not in self._named)
        if modules:
            text = json.dumps(asdict(_List(config.model.model, modules)))
            write_private(_list_of(journal), text, is_durable=True)
        else:
            _list_of(journal).unlink(missing_ok=True)

    def add(self, config: PipelineConfig, name: str, folder: str | Path) -> PipelineConfig:
        """
        Raises:
            ConfigError: the name is taken or malformed, or there are too many adapters.
        """
        if name in (module.name for module in config.model.adapters):
            raise ConfigError(f"the adapter {name!r} is already loaded", param=PARAM)
        return _with_adapters(config, (*config.model.adapters, LoraModule(name, Path(folder).absolute())))

    def remove(self, config: PipelineConfig, name: str) -> PipelineConfig:
        """
        Raises:
            ConfigError: it is not loaded, or it comes from the settings.
        """
        if name in self._named:
            raise ConfigError(f"the adapter {name!r} comes from the settings and cannot be unloaded", param=PARAM)
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
