"""Logging of the launcher's own process. The workers' logs lie in the run directory, one file each."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..protocol.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

LEVELS = ("debug", "info", "warning", "error")


def set_up_logging(level: str, console: Console) -> None:
    """Send this package's log to ``console``, above a progress bar that may run there, and nowhere else.

    Raises:
        ConfigError: there is no such level.
    """
    if level not in LEVELS:
        raise ConfigError(f"log_level is {level!r}, known are: {', '.join(LEVELS)}", param="log_level")
    handler = _ConsoleHandler(console)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    package = logging.getLogger(__name__.partition(".")[0])
    package.handlers[:] = [handler]
    package.setLevel(level.upper())


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)
