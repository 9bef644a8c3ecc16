"""Paths as users write them: ``~`` stands for a home directory, and what is there may be anything, or closed."""

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


def mode_of(path: Path) -> int | None:
    """Type and permissions of what is there; None if nothing is.

    ``Path.is_dir`` and the like do not tell that from what cannot be looked at, from Python 3.14 on.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
