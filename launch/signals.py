"""Signals end a verb by an exception, so that its workers are stopped and its run directory is removed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT  # the exit code after Ctrl-C


def exit_on_signals() -> None:
    """Turn SIGTERM, and the SIGHUP of a closed terminal, into SystemExit, just as Ctrl-C is a KeyboardInterrupt.

    A signal that this program was started to ignore, as by nohup, stays ignored.
    """
    for number in ENDING[1:]:
        handle_unless_ignored(number, _exit)


def handle_unless_ignored(number: signal.Signals, handler: Callable[[int, FrameType | None], object]) -> None:
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


@contextmanager
def interrupts_end_process() -> Iterator[None]:
    """Ctrl-C ends this process at once and silently, with nothing to clean up: for imports, in the middle of which an
    exception may surface as something else.
    """
    handle_unless_ignored(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        handle_unless_ignored(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interrupts_noted() -> Iterator[list[int]]:
    """Ctrl-C only adds to the list and interrupts nothing: the caller decides when to react."""
    noted: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    handle_unless_ignored(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """For a stop: if it were interrupted, its run directory would remain."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
