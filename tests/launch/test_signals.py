"""Which signals a verb handles."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from triptych.launch.signals import ENDING, exit_on_signals


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_closed_terminal_ends_a_verb_unless_nohup_started_it() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    exit_on_signals()
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    exit_on_signals()
    signal.raise_signal(signal.SIGHUP)
