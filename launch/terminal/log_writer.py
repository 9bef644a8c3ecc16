"""Writes the log of a server in a thread of its own. Its reader may stop reading without closing it, as a terminal does
after Ctrl-S, or that of a lost connection: then only the log waits. (The end of a process would too, with the standard
library's ``QueueListener``.)
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import Full, Queue
from typing import TextIO

MAX_LINES = 10_000  # that wait to be written; further ones are lost
FLUSH_S = 1.0  # for the rest at the end


class LogWriter(logging.Handler):
    """A handler that never waits."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """``write`` takes a line without its break, and may raise OSError."""
        super().__init__()
        self._write = write
        self._lines: Queue[str] = Queue(MAX_LINES)
        self._num_lost = 0
        threading.Thread(target=self._run, name="triptych-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except Full:
            self._num_lost += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, if that is possible soon; called at the end of the process."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_S)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            num_lost, self._num_lost = self._num_lost, 0
            try:
                self._write(line)
                if num_lost:
                    self._write(f"lines of the log lost, as nobody read it: {num_lost}")
            except (OSError, ValueError):  # it is closed or full: the next line may find it different
                pass
            finally:
                self._lines.task_done()


def line_writer(stream: TextIO) -> Callable[[str], None]:
    """Writes lines to the descriptor of a stream: its own lock would keep the process from ending while this waits."""

    def write(line: str) -> None:
        rest = f"{line}\n".encode(stream.encoding or "utf-8", stream.errors or "replace")
        while rest:
            rest = rest[os.write(stream.fileno(), rest) :]

    return write
