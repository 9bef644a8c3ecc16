"""Answers many prompts: as many in flight as a client may have, with the answers in the order of the prompts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from ..driver.requests import MAX_IN_FLIGHT
from ..driver.stream import Completion, Stream
from ..protocol.errors import Overloaded, PipelineClosed, RequestError
from .pipeline import Pipeline
from .prompts import Job

RETRY_S = 0.1  # when a request refused for lack of room is sent again, unless another one ends earlier
OVERLOADED_S = 30.0  # for how long it is retried

Result: TypeAlias = Completion | RequestError


class Batch:
    """Jobs with their requests, answered by one pipeline. The progress can be read from any thread."""

    def __init__(self, pipeline: Pipeline, jobs: Sequence[tuple[Job, dict[str, Any]]]) -> None:
        self._pipeline = pipeline
        self.num_jobs = len(jobs)
        self._jobs = iter(jobs)
        self._flights: deque[_Flight] = deque()  # in the order of the jobs
        self._ended: SimpleQueue[_Flight] = SimpleQueue()
        self._refused: list[_Flight] = []  # for lack of room
        self._num_tokens = 0  # of what was returned so far
        self.num_ended = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens + sum(flight.num_tokens for flight in [*self._flights])

    def answers(self) -> Iterator[tuple[Job, Result]]:
        """Each job with its answer or error. Closing the generator aborts the requests in flight.

        Raises:
            TriptychError: the pipeline ended, so no further answers will come.
        """
        try:
            self._take_off()
            while self._flights:
                self._land(self._next_ended())
                while self._flights and (result := self._flights[0].result) is not None:
                    flight = self._flights.popleft()
                    self._num_tokens += flight.num_tokens
                    yield flight.job, result
                self._take_off()
        finally:
            for flight in self._flights:
                flight.abort()

    def _take_off(self) -> None:
        while len(self._flights) < MAX_IN_FLIGHT and (pair := next(self._jobs, None)) is not None:
            flight = _Flight(*pair)
            self._flights.append(flight)
            if flight.result is None:
                self._submit(flight)
            else:
                self._ended.put(flight)

    def _submit(self, flight: _Flight) -> None:
        flight.stream = self._pipeline.client.submit(**flight.request)
        flight.stream.on_done(lambda: self._ended.put(flight))
        # A driver that gives up ends everything submitted before: checking afterwards cannot miss this request.
        self._pipeline.check()

    def _next_ended(self) -> _Flight | None:
        """The next flight that ended; None if it is time to retry the refused ones."""
        try:
            return self._ended.get(timeout=RETRY_S if self._refused else None)
        except Empty:
            return None

    def _land(self, flight: _Flight | None) -> None:
        if flight is not None and not flight.land():
            self._refused.append(flight)
            return
        self.num_ended += flight is not None
        refused, self._refused = self._refused, []
        for again in refused:
            self._submit(again)


def num_tokens_of(answer: Completion) -> int:
    """What the work is counted by: the tokens of the answer; an embedding has none, so those of its prompt."""
    return answer.usage["completion_tokens" if answer.embedding is None else "prompt_tokens"]


class _Flight:
    """A job in progress; one with an error has ended before it started."""

    def __init__(self, job: Job, request: dict[str, Any]) -> None:
        self.job, self.request = job, request
        self.stream: Stream | None = None
        self.result: Result | None = job.error
        self._patient_until: float | None = None  # set when it is first refused for lack of room

    @property
    def num_tokens(self) -> int:
        if isinstance(self.result, Completion) and self.result.embedding is not None:
            return num_tokens_of(self.result)
        return self.stream.num_tokens if self.stream is not None else 0

    def land(self) -> bool:
        """Take the result of a stream that ended; False if there was no room for it and it may be retried.

        Raises:
            TriptychError: an error that ends all other requests too.
        """
        if self.stream is None:
            return True
        try:
            self.result = self.stream.result(0)
        except Overloaded as error:  # our own or other clients' requests fill the queue; as they end, there is room
            self._patient_until = self._patient_until or time.monotonic() + OVERLOADED_S
            if time.monotonic() < self._patient_until:
                return False
            self.result = error
        except RequestError as error:
            self.result = error
        return True

    def abort(self) -> None:
        if self.stream is not None and self.result is None:
            with suppress(PipelineClosed):  # which ended every request
                self.stream.abort()
