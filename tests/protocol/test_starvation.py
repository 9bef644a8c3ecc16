"""Time that a process waits for a processor."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import eventually
from triptych.protocol import starvation
from triptych.protocol.starvation import OwnTime, Starvation, major_faults, run_delays


def test_waiting_for_a_processor_is_measured() -> None:
    """Two busy processes on one processor: each waits while the other runs."""
    processor = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"
    with contextlib.ExitStack() as stack:
        pair = [stack.enter_context(subprocess.Popen([sys.executable, "-c", spin])) for _ in range(2)]
        for process in pair:
            stack.callback(process.kill)
        eventually(lambda: all(max(run_delays(process.pid).values(), default=0) > 10_000_000 for process in pair))
    assert run_delays(pair[0].pid) == {}


def test_process_that_ends_during_the_look_has_no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11's glob finds its folder first and then fails to read it, which ended a stop with an exception."""
    scandir = os.scandir
    with subprocess.Popen(["sleep", "60"]) as process:

        def end_first(path: Path | str) -> Any:
            process.kill()
            process.wait()
            return scandir(path)

        monkeypatch.setattr(os, "scandir", end_first)
        monkeypatch.setattr(os, "listdir", lambda path: [entry.name for entry in end_first(path)])
        assert run_delays(process.pid) == {}


def test_own_time_stands_still_while_a_process_waits_for_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, waited_ns = [100.0], [5]
    monkeypatch.setattr(starvation, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(starvation, "run_delays", lambda pid: {pid: waited_ns[0] * pid, 0: 7})
    clock = OwnTime(1, 2)
    now_s[0], waited_ns[0] = 110.0, 5 + 2 * 10**9
    assert clock.elapsed_s == pytest.approx(10.0 - 4.0)
    now_s[0], waited_ns[0] = 200.0, 5 + 90 * 10**9  # but not for ever: it may also be stuck
    assert clock.elapsed_s == pytest.approx(100.0 - OwnTime.MAX_WAIT_S)


def test_time_in_which_memory_comes_back_from_swap_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the first step after days without a request. Each look after further faults counts as a wait."""
    seen = iter([10, 500, 900, 900, 7])
    monkeypatch.setattr(starvation, "major_faults", lambda _: next(seen))
    monkeypatch.setattr(starvation, "run_delays", lambda _: {1: 0})
    silence = Starvation()
    assert [silence.of(1, silent_s, 3.0) for silent_s in (1.0, 2.0, 2.5, 3.5, 4.5)] == [0.0, 0.0, 0.5, 1.5, 1.5]
    assert [silence.of(1, silent_s, 3.0) for silent_s in (0.1, 2.0)] == [0.0, 0.0]


def test_faults_of_a_process_are_counted() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    assert before <= major_faults(os.getpid()) <= resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    assert major_faults(2**22 + 1) == 0
