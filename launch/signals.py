"""What signals do to a verb: it ends by an exception, so that its workers are stopped and its run directory removed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_on_signals() -> None:
    """Turn SIGTERM, and the SIGHUP of a closed terminal, into SystemExit, as Ctrl-C is a KeyboardInterrupt already."""
    for number in ENDING[1:]:
        signal.signal(number, _exit)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """For a stop: one that is broken off leaves its run directory behind."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
