from __future__ import annotations

from tests.simulation.clock import Clock, installed
from triptych.workers.summarize.rate import Rate


def test_tokens_count_for_two_seconds() -> None:
    clock = Clock()
    with installed(clock):
        rate, found = Rate(), list[float]()
        for _ in range(4):
            if clock.now < 3:
                rate.add(4)
            found.append(rate.per_second())
            clock.advance_to(clock.now_ns + 1_500_000_000)
    assert found == [2.0, 4.0, 2.0, 0.0]
