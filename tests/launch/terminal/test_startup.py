"""What a start prints about itself."""

from __future__ import annotations

import io
import itertools
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from triptych.launch.terminal.startup import Startup, start


def observed() -> Startup:
    """Three workers, sampled once a second; execute is ready last."""
    now = iter(range(10))
    startup = Startup(clock=lambda: float(next(now)))
    looks = [("down", "down"), ("starting", "starting"), ("ready", "loading"), ("ready", "warming"), ("ready", "ready")]
    for prepare, execute in looks:
        startup.observe({"prepare": (prepare, 0, 0), "execute": (execute, 0, 0)})
    return startup


def test_each_process_has_a_line_with_its_phases() -> None:
    assert observed().account({"prepare": 7, "execute": 8}) == [
        "prepare    pid 7 · ready after 3.0 s (starting 1.0 s)",
        "execute    pid 8 · ready after 5.0 s (starting 1.0 s, loading 1.0 s, warming 1.0 s)",
    ]


def test_last_process_is_the_one_the_start_waited_for() -> None:
    assert observed().last() == "execute ready after 5.0 s (starting 1.0 s, loading 1.0 s, warming 1.0 s)"


@pytest.mark.parametrize(("seconds", "total", "num_told"), [(9, 0, 1), (5, 0, 0), (9, 7, 0)])
def test_load_without_progress_is_explained_once(seconds: int, total: int, num_told: int) -> None:
    """``make demo`` on a fresh machine said nothing for half a minute."""
    now = itertools.count(0, 0.5)  # read twice a look
    startup, phases = Startup(clock=lambda: next(now)), {"execute": ("loading", 0, total)}
    texts = []
    for _ in range(seconds):
        startup.observe(phases)
        texts.append(startup.explanation(phases))
    assert len(list(filter(None, texts))) == num_told


class Starting:
    """A driver that is sampled once, before any worker appears."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self._meanwhile = meanwhile
        self.phases = {"prepare": ("down", 0, 0), "execute": ("loading", 3, 7)}

    def start(self, *, progress: Callable[[Any], None]) -> None:
        self._meanwhile()
        try:
            progress(self)
        except KeyboardInterrupt:
            self.phases = {"prepare": ("stopped", 0, 0)}  # takes a while
            raise


def console(file: io.StringIO) -> Console:
    """A console whose clock advances by a second each time it is read."""
    clock = itertools.count()
    return Console(file=file, force_terminal=True, color_system=None, width=80, get_time=lambda: float(next(clock)))


def test_worker_that_does_not_appear_yet_is_starting() -> None:
    shown = io.StringIO()
    start(Starting(lambda: None), console(shown))  # type: ignore[arg-type]
    assert "prepare    starting" in shown.getvalue()
    assert "down" not in shown.getvalue()
    assert re.search("prepare .* 0:00:0[1-9]", shown.getvalue())


def test_ctrl_c_is_acknowledged_before_the_workers_have_stopped() -> None:
    shown, before = io.StringIO(), signal.getsignal(signal.SIGINT)

    def press_twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        start(Starting(press_twice), console(shown))  # type: ignore[arg-type]
    assert shown.getvalue().endswith("stopping…\n")
    assert signal.getsignal(signal.SIGINT) is before
