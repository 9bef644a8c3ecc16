"""Many prompts at once: as many in flight as a client may have, the answers in the order of the prompts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeAlias

from ..driver.client import MAX_IN_FLIGHT, Client
from ..driver.stream import Completion
from ..protocol.errors import Overloaded, PipelineClosed, RequestError, RequestTimeout
from .pipeline import Pipeline
from .prompts import Job

LOOK_S = 0.1  # how often the progress is shown, and a driver that gave up is noticed
OVERLOADED_S = 30.0  # how long a request that finds no room is sent again

Result: TypeAlias = Completion | RequestError


def answers(
    pipeline: Pipeline, jobs: Iterable[tuple[Job, dict[str, Any]]], *, look: Callable[[int], None]
) -> Iterator[tuple[Job, Result]]:
    """Each job and its request give the job and the answer, or what it failed by.

    ``look`` is called several times a second with the number of jobs that have ended. Closing the generator aborts
    the requests in flight.

    Raises:
        WorkerDied: the driver gave up.
    """
    flights: deque[_Flight] = deque()
    num_landed = 0

    def land() -> tuple[Job, Result]:
        nonlocal num_landed
        while (result := flights[0].wait(LOOK_S)) is None:
            look(num_landed + sum(flight.done for flight in flights))
            pipeline.check()
        num_landed += 1
        look(num_landed)
        return flights.popleft().job, result

    try:
        for job, request in jobs:
            flights.append(_Flight(pipeline.client, job, request))
            if len(flights) == MAX_IN_FLIGHT:
                yield land()
        while flights:
            yield land()
    finally:
        for flight in flights:
            flight.abort()


class _Flight:
    """A job on its way; one that was bad from the start has ended before it began."""

    def __init__(self, client: Client, job: Job, request: dict[str, Any]) -> None:
        self.job = job
        self._client = client
        self._request = request
        self._stream = None if job.error else client.submit(**request)
        self._patient_until: float | None = None  # set when it was first refused for lack of room

    @property
    def done(self) -> bool:
        return self._stream is None or self._stream.done

    def wait(self, timeout: float) -> Result | None:
        """The result, or None if it is not there within ``timeout`` seconds."""
        if self._stream is None:
            return self.job.error
        try:
            return self._stream.result(timeout)
        except RequestTimeout:
            return None
        except Overloaded as error:  # ours or other people's requests fill the queue; as they end, there will be room
            self._patient_until = self._patient_until or time.monotonic() + OVERLOADED_S
            if time.monotonic() > self._patient_until:
                return error
            time.sleep(timeout)
            self._stream = self._client.submit(**self._request)
            return None
        except RequestError as error:
            return error

    def abort(self) -> None:
        if self._stream is not None:
            with suppress(PipelineClosed):  # and with it every request
                self._stream.abort()
