"""Whether the package on the disk is still the one that this program imported: its workers are started from there."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

from .. import __version__
from ..protocol.errors import ConfigError

_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
_FOLDERS = ("protocol", "workers")  # what workers import


class Installation:
    """The package as it is on the disk now, to which its later states are compared."""

    def __init__(self) -> None:
        self._folder = Path(sys.modules[__package__.partition(".")[0]].__file__ or "").parent
        self._sources = self._read_sources()

    def upgraded_to(self) -> str:
        """The version of a process that is started now, if it is another one or its sources have changed; empty if not,
        or if it cannot be told, as during an installation.
        """
        with suppress(OSError):
            found = _VERSION.search((self._folder / "__init__.py").read_text(encoding="utf-8"))
            if found is not None and (found[1] != __version__ or self._read_sources() != self._sources):
                return found[1]
        return ""

    def check(self) -> None:
        """
        Raises:
            ConfigError: a new worker would be of another version than the others.
        """
        if version := self.upgraded_to():
            raise ConfigError(explain(version))

    def _read_sources(self) -> dict[str, tuple[int, int]]:
        """Sizes and times of all sources. To hash their content would take 9 ms in place of 2."""
        files = (file for folder in _FOLDERS for file in (self._folder / folder).rglob("*.py"))
        return {str(file): (stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]}


def explain(version: str) -> str:
    """What that means for a running pipeline. ``version``: of its new processes."""
    what = f"upgraded from {__version__} to {version}" if version != __version__ else "changed on the disk"
    return f"Triptych was {what} while this pipeline ran: stop it and start it anew"
