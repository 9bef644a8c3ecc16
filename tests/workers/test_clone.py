"""A forked process is a child of the one that started its server, and can do whatever a new one can."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
import threading

import pytest

from triptych.protocol.lifeline import child_environment
from triptych.workers import clone

EXIT_CODES = {
    "has_its_own_place": 0,
    "starts_threads_and_processes": 0,
    "computes": 0,
    "draws": 0,
    "handles_signals": 0,
    "aborts": -6,
    "crashes": -11,
    "is_killed": -9,
    "exits": 5,
    "fails": 1,
}


def test_sibling_can_do_whatever_a_new_process_can_and_its_exit_code_is_known() -> None:
    """And each draws random numbers and names of its own. One test, because the imports take seconds."""
    names = [*EXIT_CODES, "draws"]
    command = [sys.executable, "-m", "tests.workers.siblings", str(os.getpid()), *names]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes = [os.waitstatus_to_exitcode(os.waitpid(int(line), 0)[1]) for line in done.stdout.splitlines()]
    assert [*zip(names, codes, strict=True)] == [(name, EXIT_CODES[name]) for name in names], done.stderr
    first, second = (line.split()[1:] for line in done.stderr.splitlines() if line.startswith("drawn: "))
    assert len(first) == 3
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_process_with_threads_is_not_forked() -> None:
    hold = threading.Event()
    thread = threading.Thread(target=hold.wait)
    thread.start()
    try:
        with pytest.raises(AssertionError, match="only this thread would go on"):
            clone.fork_sibling()
    finally:
        hold.set()
        thread.join()


def test_machine_whose_system_call_is_unknown_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clone, "num_threads", lambda: 1)  # the tests may have others
    monkeypatch.setattr(platform, "machine", lambda: "another")
    with pytest.raises(OSError, match="CLONE_PARENT") as error:
        clone.fork_sibling()
    assert error.value.errno == errno.ENOSYS
