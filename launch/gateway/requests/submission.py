"""The pipeline requests of one HTTP request: one for each prompt, with all choices followed together."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import anyio

from ....driver.async_client import AsyncClient
from ....driver.async_stream import AsyncStream
from ....driver.choices import num_choices
from ....driver.stream import Completion, Delta
from ....protocol.errors import Overloaded, TriptychError
from ..errors import aborted

MAX_IN_FLIGHT = 64  # sequences of one HTTP request
RETRY_S = 0.1  # when a prompt refused for lack of room is sent again, unless another one ends earlier
OVERLOADED_S = 30.0  # for how long it is retried, if it is not the first


Piece = tuple[int, Delta | Completion]  # of the choice with this index: what is new, or that it has ended


class Choices:
    """Running requests of the pipeline. If one is refused, or a choice fails, all are aborted.

    The choices of a request are adjacent, so a prompt with ``n`` choices has ``n`` indices. At most ``MAX_IN_FLIGHT``
    sequences are in the pipeline at once: all HTTP requests share the limits of one of its clients.
    """

    def __init__(self, requests: Sequence[AsyncStream]) -> None:
        """``requests`` are already running."""
        self.num_prompt_tokens = 0  # of all requests accepted so far
        self._sent = list(requests)
        self._tasks: list[asyncio.Task[None]] = []
        self._has_ended = asyncio.Event()  # one has ended; awaited by those refused for lack of room
        self._accepted: list[asyncio.Future[AsyncStream]] = [_future() for _ in requests]
        self._sizes = [len(request.choices) for request in requests]
        for future, request in zip(self._accepted, requests, strict=True):
            future.set_result(request)

    @classmethod
    async def submit(
        cls, client: AsyncClient, request_id: str, requests: Sequence[Mapping[str, Any]], *, keep: bool = False
    ) -> Choices:
        """Send as many as may be in flight, wait until those are accepted, and send the others as these end.

        Raises:
            RequestError: one was refused.
        """
        choices = cls([])
        choices._accepted = [_future() for _ in requests]
        choices._sizes = [num_choices(request) for request in requests]
        num_at_once = max(1, MAX_IN_FLIGHT // max(map(_num_sequences, requests), default=1))
        room = asyncio.Semaphore(num_at_once)

        async def carry(index: int, request: Mapping[str, Any]) -> None:
            own_id = f"{request_id}.{index}" if index else request_id

            def send(attempt: int) -> AsyncStream:
                name = f"{request_id}.{index}.{attempt}" if attempt else own_id
                return client.submit(request_id=name, keep=keep, **request)

            async with room:
                await choices._carry(index, send)

        choices._tasks = [asyncio.create_task(carry(index, request)) for index, request in enumerate(requests)]
        try:
            for accepted in choices._accepted[:num_at_once]:
                await asyncio.shield(accepted)
        except BaseException as error:
            if keep and isinstance(error, asyncio.CancelledError):  # the connection is lost, but the request is kept
                choices.detach()
            else:
                choices.abort()
            raise
        return choices

    async def _carry(self, index: int, send: Callable[[int], AsyncStream]) -> None:
        """One request from its submission to its end."""
        try:
            stream = await self._accept(send)
        except Exception as error:  # raised to the waiter of the future
            # Without this frame, which refers to the future: such a ring is only found by a search for garbage.
            self._accepted[index].set_exception(error.with_traceback(None))
            return
        self._accepted[index].set_result(stream)
        await stream.wait()
        self._has_ended.set()

    async def _accept(self, send: Callable[[int], AsyncStream]) -> AsyncStream:
        """Send until there is room, with a new id each time: a refused id may be used up, see ``Exchange._accept``."""
        patient_until = None
        for attempt in itertools.count():
            stream = send(attempt)
            self._sent.append(stream)
            try:
                accepted = await stream.accepted()
                self.num_prompt_tokens += accepted.num_prompt_tokens
                return stream
            except Overloaded:
                if not any(each.done() for each in self._accepted):
                    raise
                # There will be room as our own requests end and the remains of ended ones are removed.
                patient_until = patient_until or time.monotonic() + OVERLOADED_S
                is_ours = any(map(_goes_on, self._accepted))
                if not is_ours and time.monotonic() > patient_until:
                    raise
                self._has_ended.clear()
                with anyio.move_on_after(None if is_ours else RETRY_S):
                    await self._has_ended.wait()
        raise AssertionError("attempts have no end")

    async def results(self) -> list[Completion]:
        """Every complete answer.

        Raises:
            RequestError: one failed, or was ended by the service.
        """
        try:
            return [
                _checked(await choice.result())
                for accepted in self._accepted
                for choice in (await asyncio.shield(accepted)).choices
            ]
        except TriptychError:
            self.abort()
            raise

    def pieces(self, ends: dict[int, Completion], *, interval: int = 1) -> AsyncIterator[Piece]:
        """Pieces of all choices as they arrive, then the end of each, which is added to ``ends``. A piece has at least
        ``interval`` tokens, except for the first and the last of a choice.

        Raises:
            RequestError: one failed; its tokens were yielded before.
        """
        if self._sizes == [1]:
            return _follow(0, self._accepted[0].result(), ends, interval=interval)
        return self._joined(ends, interval)

    async def _joined(self, ends: dict[int, Completion], interval: int) -> AsyncIterator[Piece]:
        queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        places = [(accepted, own) for accepted, size in zip(self._accepted, self._sizes, strict=True)
                  for own in range(size)]  # fmt: skip

        async def pump(index: int, request: asyncio.Future[AsyncStream], own: int) -> None:
            try:
                stream = (await asyncio.shield(request)).choices[own]
                async for piece in _follow(index, stream, ends, interval=interval):
                    queue.put_nowait(piece)
            except Exception as error:  # raised by the reader of the queue
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(index, *place)) for index, place in enumerate(places)]
        try:
            num_left = len(tasks)
            while num_left:
                found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                num_left -= isinstance(found[1], Completion)
                yield found
        finally:
            for task in tasks:
                task.cancel()

    def abort(self) -> None:
        """Abort what is running, and send nothing more."""
        self._stop_sending()
        for request in self._sent:
            if not request.done:
                request.abort()

    def detach(self) -> None:
        """Stop following what is running: it goes on until it is resumed or its lease ends."""
        self._stop_sending()
        for request in self._sent:
            if not request.done:
                request.detach()

    def _stop_sending(self) -> None:
        for task in self._tasks:
            task.cancel()


def _future() -> asyncio.Future[AsyncStream]:
    """A future whose exception need not be retrieved."""
    future: asyncio.Future[AsyncStream] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _goes_on(accepted: asyncio.Future[AsyncStream]) -> bool:
    """Whether this request was accepted and has not ended."""
    return accepted.done() and accepted.exception() is None and not accepted.result().done


def _num_sequences(request: Mapping[str, Any]) -> int:
    return max(int(request.get("n", 1)), int(request.get("best_of", 1)))


async def _follow(
    index: int, stream: AsyncStream, ends: dict[int, Completion], *, interval: int
) -> AsyncIterator[Piece]:
    wanted = 1  # the first token is never delayed
    while deltas := await stream.take():
        while wanted > 1 and sum(len(delta.token_ids) for delta in deltas) < wanted and (more := await stream.take()):
            deltas += more
        yield index, Delta.joined(deltas)
        wanted = interval
    ends[index] = _checked(await stream.result())
    yield index, ends[index]


def _checked(completion: Completion) -> Completion:
    if completion.finish_reason == "abort":
        raise aborted()
    return completion
