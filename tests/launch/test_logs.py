"""The log of a verb whose standard error nobody reads any more."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

import pytest

from triptych.launch.error_console import ErrorConsole
from triptych.launch.logs import set_up_logging


@pytest.mark.parametrize("looks_like_a_terminal", [False, True])
def test_log_without_a_reader_ends_no_thread(monkeypatch: pytest.MonkeyPatch, looks_like_a_terminal: bool) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1") if looks_like_a_terminal else monkeypatch.delenv("FORCE_COLOR", False)
    package = logging.getLogger("triptych")
    handlers, level = package.handlers[:], package.level
    reader, writer = os.pipe()
    pipe = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stderr", pipe)
    try:
        set_up_logging("info", ErrorConsole())
        os.close(reader)
        for _ in range(2):
            logging.getLogger("triptych.launch").info("a line")
    finally:
        package.handlers[:] = handlers
        package.setLevel(level)
        with suppress(BrokenPipeError):
            pipe.close()
