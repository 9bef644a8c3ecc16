"""Generates load: every request is sent at its own time, whatever happens to the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from ...protocol.errors import TriptychError
from .options import LoadOptions
from .record import Record
from .workload import Query, arrival_times

Clock = Callable[[], float]

# The effects of a server that is gone, cuts a reply short, or sends something other than JSON.
BROKEN = (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)


class Failure(Exception):
    """A request that ended with an error of its server."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message


class Target(Protocol):
    """What the load is sent to."""

    async def ask(self, query: Query, record: Record, clock: Clock) -> None:
        """Fill the record with times of ``clock`` as the answer comes.

        Raises:
            Failure: the server answered with an error.
            OSError, asyncio.IncompleteReadError, TriptychError: it did not answer.
        """
        ...


@dataclass(slots=True)
class Run:
    """A load in progress."""

    records: list[Record] = field(default_factory=list)
    num_sent: int = 0
    num_ended: int = 0
    duration_s: float = 0.0
    target: str = ""  # its display name

    def keep_ended(self) -> None:
        """Drop requests that were in flight or not yet sent when the load was interrupted."""
        self.records = [record for record in self.records if record.ended_s is not None or record.error is not None]


async def drive(target: Target, queries: Sequence[Query], load: LoadOptions, run: Run) -> Run:
    """Send all queries, each at its time; ``run`` is updated meanwhile."""
    started = time.perf_counter()
    turns = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()
    is_open = load.request_rate is not None  # otherwise a request arrives when it is sent

    def clock() -> float:
        return time.perf_counter() - started

    async def one(query: Query, record: Record) -> None:
        await asyncio.sleep(record.scheduled_s - clock())
        async with turns:
            record.sent_s = clock()
            record.scheduled_s = record.scheduled_s if is_open else record.sent_s
            run.num_sent += 1
            await _ask(target, query, record, clock)
            run.num_ended += 1

    run.records[:] = [Record(index, arrival) for index, arrival in enumerate(arrival_times(load, len(queries)))]
    try:
        await asyncio.gather(*(one(query, record) for query, record in zip(queries, run.records, strict=True)))
    finally:
        run.duration_s = clock()
    return run


async def _ask(target: Target, query: Query, record: Record, clock: Clock) -> None:
    try:
        await target.ask(query, record, clock)
        record.ended_s = clock()
    except (Failure, TriptychError) as error:
        record.error, record.message = error.code, error.message
    except BROKEN as error:
        record.error, record.message = type(error).__name__, str(error)
