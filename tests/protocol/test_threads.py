"""Threads that cannot be started, or are none."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

import pytest

from triptych.protocol.errors import ConfigError
from triptych.protocol.threads import start_thread


def test_threads_that_are_greenlets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a thread waited in ZeroMQ for ever, and everything else with it."""

    def start_greenlet(_: Callable[[], None]) -> None: ...

    start_greenlet.__module__ = "gevent.thread"
    monkeypatch.setattr(_thread, "start_new_thread", start_greenlet)
    with pytest.raises(ConfigError, match="gevent has replaced the threads of this process"):
        start_thread(threading.Thread())
