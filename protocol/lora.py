"""LoRA adapters as named on the command line, and what is known of them without their model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .errors import ConfigError
from .home import from_home

MAX_ADAPTERS = 64
MAX_RANK = 512
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"[\w.:/@+-]{1,128}", re.ASCII)
PARAM = "lora_modules"
_CHUNK_BYTES = 1 << 20


class LoraModule(NamedTuple):
    """An adapter and its folder."""

    name: str
    folder: Path

    def __str__(self) -> str:
        """The form that ``parse_modules`` reads."""
        return f"{self.name}={self.folder}"

    @property
    def files(self) -> tuple[Path, Path]:
        return self.folder / CONFIG_FILE, self.folder / WEIGHTS_FILE

    def digest(self) -> str:
        """A hash of all its files.

        Raises:
            ConfigError: a file is missing or cannot be read.
        """
        digest = hashlib.sha256()
        for file in self.files:
            try:
                if file.exists() and not file.is_file():  # a pipe, say: opening it would block
                    raise ConfigError(f"the adapter {self.name!r} cannot be read: {file} is not a file", param=PARAM)
                with file.open("rb") as stream:
                    digest.update(b"%d\n" % file.stat().st_size)
                    while chunk := stream.read(_CHUNK_BYTES):
                        digest.update(chunk)
            except OSError as error:
                raise ConfigError(
                    f"the adapter {self.name!r} cannot be read: {file}: {error.strerror}", param=PARAM
                ) from error
        return digest.hexdigest()[:32]


def parse_modules(texts: Iterable[str]) -> tuple[LoraModule, ...]:
    """The adapters named by texts of the form ``NAME=PATH``.

    Raises:
        ConfigError: one is not of this form, a name occurs twice, or there are too many.
    """
    modules = [_parse(text) for text in texts]
    if len(modules) > MAX_ADAPTERS:
        raise ConfigError(f"lora_modules has {len(modules)} adapters, the limit is {MAX_ADAPTERS}", param=PARAM)
    names = [module.name for module in modules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"lora_modules has the name {twice[0]!r} more than once", param=PARAM)
    return tuple(modules)


def _parse(text: str) -> LoraModule:
    name, _, path = text.partition("=")
    if not _NAME.fullmatch(name) or not path:
        raise ConfigError(
            f"lora_modules is {text!r}, the form is NAME=PATH, with a name of 1 to 128 letters, digits and .:/@+_-",
            param=PARAM,
        )
    return LoraModule(name, from_home(path, param=PARAM).absolute())
