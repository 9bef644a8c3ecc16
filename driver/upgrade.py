"""Whether the package on the disk is still the one that this program imported: its workers are started from there."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

from .. import __version__
from ..protocol.errors import ConfigError

_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def upgraded_to() -> str:
    """The version of a process that is started now, if it is another one; empty if not, or if it cannot be told, as
    during an installation.
    """
    package = sys.modules[__package__.partition(".")[0]]
    with suppress(OSError):
        found = _VERSION.search(Path(package.__file__ or "").read_text(encoding="utf-8"))
        return found[1] if found is not None and found[1] != __version__ else ""
    return ""


def explain(version: str) -> str:
    """What that means for a running pipeline. ``version``: of its new processes."""
    return f"Triptych was upgraded from {__version__} to {version} while this pipeline ran: stop it and start it anew"


def check_not_upgraded() -> None:
    """
    Raises:
        ConfigError: a new worker would be of another version than the others.
    """
    if version := upgraded_to():
        raise ConfigError(explain(version))
