"""Logging of the launcher's own processes. The workers' logs are in the run directory, one file each."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ...protocol.errors import ConfigError
from .json_lines import in_one_line
from .log_writer import LogWriter, line_writer
from .report import say

if TYPE_CHECKING:
    from rich.console import Console

LEVELS = ("debug", "info", "warning", "error")


def set_up_logging(level: str, console: Console, *, is_server: bool = False) -> None:
    """Send this package's log to ``console``, above any progress bar there, and nowhere else. A file, or a pipe whose
    reader may come back, gets each line on its own: rich would collect those that it could not write. A server does not
    wait for its reader.

    Raises:
        ConfigError: there is no such level.
    """
    handler = _ConsoleHandler(console) if console.is_terminal else logging.StreamHandler(console.file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    _use(_in_background(handler) if is_server else handler, level)


def set_up_stream_logging(level: str, log_format: str, *, process: str) -> None:
    """Send a server's log, and uvicorn's, to standard error, as text or as one JSON object per line.

    Raises:
        ConfigError: there is no such level.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        text = f"%(asctime)s %(levelname)-7s {process}: %(message)s"
        handler.setFormatter(logging.Formatter(text, "%H:%M:%S"))
    writer = _in_background(handler)
    _use(writer, level)
    for name in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(name).handlers[:] = [writer]
        logging.getLogger(name).setLevel("WARNING")
        logging.getLogger(name).propagate = False


def flush_log() -> None:
    """Write what is left of it, if it can be written soon."""
    for handler in _package().handlers:
        with suppress(OSError, ValueError):  # its reader is gone, or it is closed
            handler.flush()


def _package() -> logging.Logger:
    return logging.getLogger(__name__.partition(".")[0])


def _use(handler: logging.Handler, level: str) -> None:
    if level not in LEVELS:
        raise ConfigError(f"log_level is {level!r}, known are: {', '.join(LEVELS)}", param="log_level")
    _package().handlers[:] = [handler]
    _package().setLevel(level.upper())


def _in_background(handler: _ConsoleHandler | logging.StreamHandler[Any]) -> LogWriter:
    writer = LogWriter(handler.show if isinstance(handler, _ConsoleHandler) else line_writer(handler.stream))
    writer.setFormatter(handler.formatter)
    return writer


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, process, logger, message, and the named arguments of the message."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(record.args, Mapping):
            entry |= {str(key): value for key, value in record.args.items() if key not in entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return in_one_line(json.dumps(entry, ensure_ascii=False, default=str))


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.show(self.format(record))
        except Exception:
            self.handleError(record)

    def show(self, line: str) -> None:
        try:
            say(self._console, line, "none")
        except OSError:  # the terminal is gone: rich would keep all lines, and try to write them again with each one
            self._console.quiet = True
