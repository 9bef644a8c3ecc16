"""``Stream`` for asyncio: the events of the session's thread, delivered to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from ..protocol.errors import PipelineClosed, RequestTimeout, TriptychError
from ..protocol.messages import Accepted
from .choices import choice_ids
from .session import Session
from .stream import Completion, Delta, shown, told_another


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop of the calling coroutine.

    Raises:
        RuntimeError: there is none, or it is not asyncio's.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        text = "this needs a running event loop of asyncio; elsewhere, as under trio, use Driver or Client in a thread"
        raise RuntimeError(text) from None


class Mailbox:
    """Calls to be made in an event loop's thread. All calls put since the last drain share one wake-up: a step of 256
    requests costs one wake-up, not 256.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_awake = False  # a drain is scheduled and has not started yet

    def put(self, function: Callable[..., None], *arguments: Any) -> None:
        """Thread-safe."""
        self._calls.append((function, arguments))
        if not self._is_awake:
            self._is_awake = True
            with suppress(RuntimeError):  # the loop is closed, so that nothing can listen
                self.loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._is_awake = False  # before draining: a later put must wake the loop again
        while self._calls:
            function, arguments = self._calls.popleft()
            function(*arguments)


class AsyncStream:
    """A running request. Iterate over its deltas with ``async for``, or await its ``result``. A loop that is left or
    cancelled ends nothing: call ``abort`` in a ``finally`` if nobody needs the rest.
    """

    def __init__(self, request_id: str, session: Session, mailbox: Mailbox) -> None:
        self.request_id = request_id
        self._session = session
        self._mailbox = mailbox
        self._num_tokens = 0
        loop = running_loop()
        self._deltas: deque[Delta] = deque()  # not read yet
        self._has_news = asyncio.Event()  # deltas, or the end
        self._accepted: asyncio.Future[Accepted] = loop.create_future()
        self._result: asyncio.Future[Completion] = loop.create_future()

    def __repr__(self) -> str:
        ended: Any = (self._result.exception() or self._result.result()) if self._result.done() else None
        is_accepted = self._accepted.done()
        return shown(self, self.request_id, accepted=is_accepted, num_tokens=self.num_tokens, ended=ended)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas until the end.

        Raises:
            RequestError: the request failed; the deltas before the failure were yielded.
        """
        while self._deltas or await self._arrive():
            yield self._deltas.popleft()
        await self.result()

    async def take(self) -> list[Delta]:
        """All deltas available, after waiting for the first; an empty list once the request has ended, in any way."""
        if not self._deltas:
            await self._arrive()
        taken = list(self._deltas)
        self._deltas.clear()
        return taken

    async def _arrive(self) -> bool:
        """Whether there are deltas, once there are some or the request has ended."""
        while not (self._deltas or self._result.done()):
            self._has_news.clear()
            await self._has_news.wait()
        return bool(self._deltas)

    async def accepted(self, timeout: float | None = None) -> Accepted:
        """Wait until the service has accepted the request; see ``Stream.accepted``."""
        await self._ended(self._accepted, timeout)
        return self._accepted.result()

    async def result(self, timeout: float | None = None) -> Completion:
        """Wait for the complete answer; see ``Stream.result``. Cancelling the wait does not abort the request."""
        await self._ended(self._result, timeout)
        return self._result.result()

    async def wait(self, timeout: float | None = None) -> None:
        """Return once the request has ended, successfully or not; see ``Stream.wait``."""
        await self._ended(self._result, timeout)

    async def _ended(self, future: asyncio.Future[Any], timeout: float | None) -> None:
        if not future.done():
            await asyncio.wait([future], timeout=timeout)  # if cancelled, it does not cancel the future
        if not future.done():
            raise RequestTimeout(f"request {self.request_id}: no answer within {timeout} s")

    @property
    def done(self) -> bool:
        """Whether the request has ended, successfully or not."""
        return self._result.done()

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer that have arrived, read or not."""
        return self._num_tokens

    @property
    def choices(self) -> Sequence[AsyncStream]:
        """One stream per choice of the request; the stream itself if there is only one."""
        return [self]

    def abort(self) -> None:
        """End the request, unless another stream follows it now: a refused duplicate must not end the original."""
        with suppress(PipelineClosed):  # which ended every request
            self._session.abort(self.request_id, reader=self)

    def detach(self) -> None:
        """Stop following: the request goes on until it is resumed or its lease ends."""
        with suppress(PipelineClosed):  # which ended every request
            self._session.detach(self.request_id, reader=self)

    def on_accepted(self, accepted: Accepted) -> None:
        self._mailbox.put(_set, self._accepted, accepted)

    def on_delta(self, delta: Delta) -> None:
        self._num_tokens = delta.num_tokens
        self._mailbox.put(self._add, delta)

    def on_end(self, completion: Completion, error: TriptychError | None) -> None:
        self._mailbox.put(self._finish, completion, error)

    def _add(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._has_news.set()

    def _finish(self, completion: Completion, error: TriptychError | None) -> None:
        _fail(self._accepted, error or told_another(self.request_id))
        if error is None:
            _set(self._result, completion)
        else:
            _fail(self._result, error)
        self._has_news.set()


class AsyncGroupStream(AsyncStream):
    """A running request with several choices: iterate over the deltas of all, or read each of ``choices``."""

    def __init__(self, request_id: str, num_choices: int, session: Session, mailbox: Mailbox) -> None:
        super().__init__(request_id, session, mailbox)
        self._choices = [AsyncStream(wire_id, session, mailbox) for wire_id in choice_ids(request_id, num_choices)]

    @property
    def choices(self) -> list[AsyncStream]:
        return self._choices

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)


def _fail(future: asyncio.Future[Any], error: TriptychError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # marks it as retrieved: awaiting it still raises, but is optional


def _set(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
