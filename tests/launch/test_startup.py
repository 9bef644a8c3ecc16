"""What a start tells of itself."""

from __future__ import annotations

from triptych.launch.startup import Startup


def observed() -> Startup:
    """Three workers, looked at once a second; execute is ready last."""
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


def test_the_last_one_is_what_the_start_waited_for() -> None:
    assert observed().last() == "execute ready after 5.0 s (starting 1.0 s, loading 1.0 s, warming 1.0 s)"
