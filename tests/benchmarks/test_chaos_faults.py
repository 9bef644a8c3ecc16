"""What the chaos test times are the faults that it has injected."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from benchmarks.chaos import faults
from benchmarks.chaos.chaos_clients import Watch
from benchmarks.chaos.faults import Faults
from triptych.protocol.board import ROLES


class Crashed:
    """A service whose prepare has just crashed: its next process has its epoch, but is not there yet."""

    def __init__(self, watch: Watch, *, hung: str = "") -> None:
        """The worker ``hung`` is replaced before anyone receives anything."""
        self.board, self._watch, self._hung = self, watch, hung
        self._epochs, self._sends = dict.fromkeys(ROLES, 8), iter([False, False, True])

    def epoch(self, role: str) -> int:
        return self._epochs[role]

    def ready(self, _: str) -> bool:
        if self._hung:
            self._epochs[self._hung] += 1
        self._watch.accept_at = float("inf")
        return True

    def send(self, role: str, number: int) -> bool:
        assert number == signal.SIGKILL
        is_there = next(self._sends)
        self._epochs[role] += is_there
        return is_there


def kill_prepare(*, hung: str = "") -> Faults:
    watch = Watch()
    service: Any = Crashed(watch, hung=hung)
    injected = Faults(service, watch, seed=1, gap_s=1.0)
    injected._timed("prepare", "prepare", signal.SIGKILL)
    return injected


def test_kill_that_is_timed_waits_for_a_process_to_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "RECOVERY_S", 5.0)
    injected = kill_prepare()
    assert injected.kills == {"prepare": 1}
    assert len(injected.ready_s["prepare"]) == 1


@pytest.mark.parametrize("hung", ["execute", "prepare"])
def test_kill_beside_which_a_worker_is_hung_does_not_count_as_one_of_a_single_worker(hung: str) -> None:
    assert list(kill_prepare(hung=hung).recovery_s) == ["prepare, and a worker by itself"]
