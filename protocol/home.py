"""Paths as users write them, in which ``~`` stands for a home directory."""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigError


def from_home(path: str | Path, *, param: str) -> Path:
    """The path with the home directory in place of ``~`` or ``~user``.

    Raises:
        ConfigError: there is no such user, or none is known for this process.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{param} is {str(path)!r:.200}: the home directory is not known", param=param) from error
