"""The log of a verb whose standard error nobody reads any more."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

from triptych.launch.terminal.error_console import ErrorConsole
from triptych.launch.terminal.logs import set_up_logging


@pytest.mark.parametrize(
    ("connect", "looks_like_a_terminal"),
    [(os.pipe, False), (os.pipe, True), (os.openpty, True)],
    ids=["pipe", "coloured pipe", "terminal"],
)
def test_log_without_a_reader_ends_no_thread_and_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[], tuple[int, int]], looks_like_a_terminal: bool
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1") if looks_like_a_terminal else monkeypatch.delenv("FORCE_COLOR", False)
    reader, writer = connect()
    pipe, console = os.fdopen(writer, "w"), ErrorConsole()
    monkeypatch.setattr(sys, "stderr", pipe)
    try:
        set_up_logging("info", console)
        os.close(reader)
        for _ in range(2):
            logging.getLogger("triptych.launch").info("a line")
    finally:
        with suppress(OSError):
            pipe.close()
    assert console.quiet == looks_like_a_terminal  # a quiet one drops what it is given
