"""``Client`` for asyncio: the same session thread, with its events delivered to the event loop."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..protocol import messages as m
from ..protocol.errors import Overloaded, PipelineClosed, RequestTimeout, TriptychError
from ..protocol.keys import ClientKeys
from ..protocol.messages import MAX_REQUEST_ROWS, Accepted
from ..protocol.sampling import SamplingParams
from .choices import choice_ids, num_choices
from .client import MAX_IN_FLIGHT, OVERLOADED_S, Client, Messages, Prompt, arguments_of, request_map
from .embedding import Embedding
from .questions import Question
from .session import Session
from .standing import RequestList, RequestStatus, list_of, status_of
from .stream import Completion, Delta


class Mailbox:
    """Calls to be made in an event loop's thread. All calls put since the last drain share one wake-up: a step of 256
    requests costs one wake-up, not 256.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_awake = False  # a drain is scheduled and has not started yet

    def put(self, function: Callable[..., None], *arguments: Any) -> None:
        """Thread-safe."""
        self._calls.append((function, arguments))
        if not self._is_awake:
            self._is_awake = True
            with suppress(RuntimeError):  # the loop is closed, so that nothing can listen
                self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._is_awake = False  # before draining: a later put must wake the loop again
        while self._calls:
            function, arguments = self._calls.popleft()
            function(*arguments)


class AsyncStream:
    """A running request. Iterate over its deltas with ``async for``, or await its ``result``."""

    def __init__(self, request_id: str, session: Session, mailbox: Mailbox) -> None:
        self.request_id = request_id
        self._session = session
        self._mailbox = mailbox
        loop = asyncio.get_running_loop()
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue()  # None: the end
        self._accepted: asyncio.Future[Accepted] = loop.create_future()
        self._result: asyncio.Future[Completion] = loop.create_future()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas until the end.

        Raises:
            RequestError: the request failed; the deltas before the failure were yielded.
        """
        while (delta := await self._deltas.get()) is not None:
            yield delta
        self._deltas.put_nowait(None)  # in case it is iterated again
        await self._result

    async def take(self) -> list[Delta]:
        """All deltas available, after waiting for the first; an empty list once the request has ended, in any way."""
        first = await self._deltas.get()
        taken = []
        while first is not None:
            taken.append(first)
            if self._deltas.empty():
                return taken
            first = self._deltas.get_nowait()
        self._deltas.put_nowait(None)
        return taken

    async def accepted(self) -> Accepted:
        """Wait until the service has accepted the request; raises the error if it was refused."""
        return await asyncio.shield(self._accepted)

    async def result(self) -> Completion:
        """The whole answer; raises the request's error. Cancelling the wait does not abort the request."""
        return await asyncio.shield(self._result)

    @property
    def done(self) -> bool:
        """Whether the request has ended, successfully or not."""
        return self._result.done()

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
        self._mailbox.put(self._deltas.put_nowait, delta)

    def on_end(self, completion: Completion, error: TriptychError | None) -> None:
        self._mailbox.put(self._finish, completion, error)

    def _finish(self, completion: Completion, error: TriptychError | None) -> None:
        for future, value in ((self._accepted, None), (self._result, completion)):
            if error is None:
                _set(future, value)
            elif not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: awaiting it still raises, but is optional
        self._deltas.put_nowait(None)


class AsyncGroupStream(AsyncStream):
    """A running request with several choices: iterate over the deltas of all, or read each of ``choices``."""

    def __init__(self, request_id: str, num_choices: int, session: Session, mailbox: Mailbox) -> None:
        super().__init__(request_id, session, mailbox)
        self._choices = [AsyncStream(wire_id, session, mailbox) for wire_id in choice_ids(request_id, num_choices)]

    @property
    def choices(self) -> list[AsyncStream]:
        return self._choices


class AsyncClient:
    """A connection to a running pipeline for asyncio; use it with ``async with``. See ``Client``."""

    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        submit: str | None = None,
        follow: str | None = None,
        keys: ClientKeys | str | Path | None = None,
        client: Client | None = None,
    ) -> None:
        """Connect like ``Client``, or share the connection of an existing ``client``."""
        self._client = client or Client(run_dir, submit=submit, follow=follow, keys=keys)
        self._session = self._client.session
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; see ``Client.close``."""
        await asyncio.to_thread(self._client.close)

    def submit(
        self,
        /,  # as in ``Client.submit``
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        params: SamplingParams | None = None,
        keep: bool = False,
        **options: Any,
    ) -> AsyncStream:
        """Send a request and return at once; must be called in the event loop. Arguments as for ``Client.submit``.

        ``keep`` leaves the answer with the service until its lease ends, so that it can still be resumed afterwards.
        """
        request_id = request_id or uuid.uuid4().hex
        request = request_map(prompt, messages, params, options)
        if (count := num_choices(request)) > 1:
            group = AsyncGroupStream(request_id, count, self._session, self._mailbox())
            self._session.submit(request_id, request, group, group.choices, keep=keep)
            return group
        stream = AsyncStream(request_id, self._session, self._mailbox())
        self._session.submit(request_id, request, stream, keep=keep)
        return stream

    def resume(
        self, request_id: str, *, num_tokens: int = 0, num_chars: int | None = 0, n: int = 1, keep: bool = False
    ) -> AsyncStream:
        """Follow a request again after the tokens the caller already has; ``num_chars`` is None if unknown.

        A request with ``n`` choices is followed from the beginning; see ``Client.resume``.
        """
        if n > 1:
            group = AsyncGroupStream(request_id, n, self._session, self._mailbox())
            self._session.resume_all(request_id, group, group.choices, keep=keep)
            return group
        stream = AsyncStream(request_id, self._session, self._mailbox())
        self._session.resume(request_id, stream, num_tokens=num_tokens, num_chars=num_chars, keep=keep)
        return stream

    def _mailbox(self) -> Mailbox:
        loop = asyncio.get_running_loop()
        if loop not in self._mailboxes:
            self._mailboxes = {loop: Mailbox(loop)}  # an earlier loop has ended, together with its streams
        return self._mailboxes[loop]

    async def generate(self, prompt: Prompt | None = None, **options: Any) -> Completion:
        """Return one complete answer. Cancelling aborts the request."""
        stream = self.submit(prompt, **options)
        try:
            return await stream.result()
        except asyncio.CancelledError:
            stream.abort()
            raise

    async def generate_all(
        self,
        prompts: Iterable[Prompt | Mapping[str, Any]],
        *,
        progress: Callable[[Completion], None] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Return the answers to many prompts; see ``Client.generate_all``. Cancelling aborts the requests."""
        waiting: deque[tuple[dict[str, Any], AsyncStream]] = deque()
        results: list[Completion] = []

        async def take_first() -> None:
            results.append(await self._first(waiting))
            if progress is not None:
                progress(results[-1])

        try:
            for prompt in prompts:
                arguments = arguments_of(prompt, options)
                waiting.append((arguments, self.submit(**arguments)))
                if len(waiting) >= MAX_IN_FLIGHT:
                    await take_first()
            while waiting:
                await take_first()
        finally:
            for _, stream in waiting:
                stream.abort()
        return results

    async def embed(self, prompt: Prompt, **options: Any) -> Embedding:
        """Return the embedding of text or token ids; see ``Client.embed``. Cancelling aborts the request."""
        return Embedding.of(await self.generate(prompt, embedding=True, **options))

    async def embed_all(
        self,
        prompts: Iterable[Prompt | Mapping[str, Any]],
        *,
        progress: Callable[[Embedding], None] | None = None,
        **options: Any,
    ) -> list[Embedding]:
        """The embeddings of many prompts; see ``Client.embed_all``. Cancelling aborts the requests."""
        tell = None if progress is None else lambda completion: progress(Embedding.of(completion))
        answers = await self.generate_all(prompts, progress=tell, embedding=True, **options)
        return [Embedding.of(each) for each in answers]

    async def _first(self, waiting: deque[tuple[dict[str, Any], AsyncStream]]) -> Completion:
        """The answer to the first one, which stays in ``waiting`` until its answer is complete."""
        while True:
            arguments, stream = waiting[0]
            try:
                completion = await stream.result()
            except Overloaded:  # retried once an answer of ours made room, or after a pause if others fill the queue
                running = next((s for _, s in waiting if not s.done), None)
                if running is None:
                    await asyncio.sleep(OVERLOADED_S)
                else:
                    with suppress(TriptychError):  # reported when its turn comes
                        await running.result()
                waiting[0] = arguments, self.submit(**arguments)
                continue
            waiting.popleft()
            return completion

    def abort(self, request_id: str) -> None:
        """Request the end of a request of this client; its stream ends with the finish reason "abort"."""
        self._session.abort(request_id)

    def detach(self, request_id: str, error: TriptychError) -> None:
        """End the stream that follows this request here, with an error; the request itself goes on."""
        self._session.detach(request_id, error)

    def fail(self, error: TriptychError) -> None:
        """End every open stream with this error; accepted requests go on in the service."""
        self._session.fail(error)

    def forget(self, request_id: str) -> None:
        """Tell the service that the answer of an ended request is no longer needed."""
        self._session.forget(request_id)

    async def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return the model, its limits, and the limits of the service."""
        return dict((await self._answer(m.GetInfo(), timeout)).info)

    async def stats(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return queues, pages, rates and totals of every stage."""
        return dict((await self._answer(m.GetStats(), timeout)).stats)

    async def status(self, request_id: str, timeout: float = 10.0) -> RequestStatus:
        """Where a request stands; an unknown one has the state "unknown"."""
        return status_of(await self._answer(m.GetStatus(request_id), timeout))

    async def requests(self, limit: int = MAX_REQUEST_ROWS, timeout: float = 10.0) -> RequestList:
        """All requests that are live or whose answer is kept, the first ``limit`` in order of arrival."""
        return list_of(await self._answer(m.GetRequests(limit), timeout))

    async def _answer(self, question: Question, timeout: float) -> Any:
        """Uses no thread per question: while the service is silent, a thread pool would soon be exhausted."""
        future = asyncio.wrap_future(self._session.ask(question))
        try:
            done, _ = await asyncio.wait([future], timeout=timeout)
        finally:
            future.cancel()  # no effect if it is done
        if not done:
            raise RequestTimeout(f"{type(question).__name__}: no answer within {timeout} s")
        return future.result()


def _set(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
