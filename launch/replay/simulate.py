"""Runs requests through replicas, as fast as their schedulers can decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...workers.execute.scheduling.cost import Prices
from ...workers.execute.scheduling.scheduler import Scheduler
from .measurements import Measurements
from .replica import Replica
from .router import Router
from .workload import Arrival


def simulate(
    arrivals: Sequence[Arrival],
    make_scheduler: Callable[[], Scheduler],
    prices: Prices,
    *,
    router: Router,
    num_replicas: int = 1,
    progress: Callable[[int], object] = lambda num_arrived: None,
) -> dict[str, Any]:
    """The figures of ``Measurements.report``. ``progress`` is called with the number of arrivals so far.

    Each replica has its own clock. The one furthest behind runs next, so that the replica that gets a request has not
    planned beyond its arrival yet, and the router sees every replica at that time or later.
    """
    seen = Measurements()
    replicas = [Replica(index, make_scheduler(), prices, seen) for index in range(num_replicas)]
    for number, arrival in enumerate(arrivals):
        _run_until(replicas, round(arrival.at_s * 1e9))
        tokens = arrival.make_tokens(number)
        prompt = tokens[: arrival.num_prompt_tokens]
        chosen = router.choose(prompt, arrival.cache_salt, [replica.load for replica in replicas])
        replicas[chosen].submit(number, arrival, tokens)
        progress(number + 1)
    _run_until(replicas, None)
    for replica in replicas:
        replica.close()
    return seen.report()


def _run_until(replicas: list[Replica], end_ns: int | None) -> None:
    """Step the replica furthest behind, until none is before ``end_ns`` or none has anything to do."""
    while busy := [replica for replica in replicas if replica.load]:
        replica = min(busy, key=lambda replica: replica.now_ns)
        if end_ns is not None and replica.now_ns >= end_ns:
            return
        replica.step()
