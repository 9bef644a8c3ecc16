"""A log whose reader stops reading."""

from __future__ import annotations

import logging
import threading

import pytest

from triptych.launch.terminal import log_writer
from triptych.launch.terminal.log_writer import LogWriter


def test_nobody_waits_for_the_reader_of_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "MAX_LINES", 4)
    monkeypatch.setattr(log_writer, "FLUSH_S", 0.001)
    is_read, lines = threading.Event(), list[str]()

    def write(line: str) -> None:
        assert is_read.wait(60)
        lines.append(line)

    writer = LogWriter(write)
    for number in range(100):
        writer.emit(logging.makeLogRecord({"msg": f"line {number}"}))
    writer.flush()
    assert not lines
    is_read.set()
    monkeypatch.setattr(log_writer, "FLUSH_S", 20)
    writer.flush()
    num_lost = 100 - sum(line.startswith("line ") for line in lines)
    assert num_lost >= 95  # one line more than fit may be under way
    assert f"lines of the log lost, as nobody read it: {num_lost}" in lines
