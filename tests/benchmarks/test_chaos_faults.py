"""What the chaos test times are the faults that it has injected."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from benchmarks.chaos import faults
from benchmarks.chaos.chaos_clients import Watch
from benchmarks.chaos.faults import Faults


class Crashed:
    """A service whose prepare has just crashed: its next process has its epoch, but is not there yet."""

    def __init__(self, watch: Watch) -> None:
        self.board, self._watch = self, watch
        self._epoch, self._sends = 8, iter([False, False, True])

    def epoch(self, _: str) -> int:
        return self._epoch

    def ready(self, _: str) -> bool:
        self._watch.accept_at = float("inf")
        return True

    def send(self, _: str, number: int) -> bool:
        assert number == signal.SIGKILL
        is_there = next(self._sends)
        self._epoch += is_there
        return is_there


def test_kill_that_is_timed_waits_for_a_process_to_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "RECOVERY_S", 5.0)
    watch = Watch()
    service: Any = Crashed(watch)
    injected = Faults(service, watch, seed=1, gap_s=1.0)
    injected._timed("prepare", "prepare", signal.SIGKILL)
    assert injected.kills == {"prepare": 1}
    assert len(injected.ready_s["prepare"]) == 1
