"""Time that a process waits for a processor."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from tests.waiting import eventually
from triptych.protocol.starvation import run_delays


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
