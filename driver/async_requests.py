"""``Requests`` for asyncio: ``AsyncClient`` has these methods, and ``AsyncDriver``."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from ..protocol import messages as m
from ..protocol.errors import Overloaded, RequestTimeout, TriptychError
from .async_stream import AsyncGroupStream, AsyncStream, Mailbox
from .embedding import Embedding
from .questions import Question
from .requests import MAX_IN_FLIGHT, OVERLOADED_S, arguments_of, is_full_of_kept, several
from .standing import RequestList, RequestStatus, list_of, status_of
from .stream import Completion
from .submitting import Prompt, Submitting


class AsyncRequests(Submitting[AsyncStream]):
    """Sends requests to a pipeline and asks about them. ``submit`` and ``resume`` must be called in the event loop."""

    @abstractmethod
    def _mailbox(self) -> Mailbox: ...

    def _stream(self, request_id: str) -> AsyncStream:
        return AsyncStream(request_id, self._session, self._mailbox())

    def _group(self, request_id: str, num_choices: int) -> AsyncStream:
        return AsyncGroupStream(request_id, num_choices, self._session, self._mailbox())

    async def generate(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Any
    ) -> Completion:
        """Return one complete answer; see ``Client.generate``. Cancelling aborts the request unless ``keep`` is set."""
        stream = self.submit(prompt, **options)
        try:
            return await stream.result(timeout)
        except BaseException:
            if not options.get("keep"):
                stream.abort()  # no effect if it has ended
            raise

    async def generate_all(
        self,
        prompts: Iterable[Prompt | Mapping[str, Any]],
        *,
        progress: Callable[[Completion], None] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Return the answers to many prompts; see ``Client.generate_all``. Cancelling aborts those without ``keep``."""
        waiting: deque[tuple[dict[str, Any], AsyncStream]] = deque()
        results: list[Completion] = []

        async def take_first() -> None:
            results.append(await self._first(waiting))
            if progress is not None:
                progress(results[-1])

        try:
            for prompt in several(prompts):
                arguments = arguments_of(prompt, options)
                waiting.append((arguments, self.submit(**arguments)))
                if len(waiting) >= MAX_IN_FLIGHT:
                    await take_first()
            while waiting:
                await take_first()
        finally:
            for arguments, stream in waiting:
                if not arguments.get("keep"):
                    stream.abort()
        return results

    async def embed(self, prompt: Prompt, *, timeout: float | None = None, **options: Any) -> Embedding:
        """Return the embedding of text or token ids; see ``Client.embed``. Cancelling aborts the request."""
        return Embedding.of(await self.generate(prompt, timeout=timeout, embedding=True, **options))

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
            except Overloaded as error:  # retried once an answer of ours ended, or after a pause if others fill it
                running = next((s for _, s in waiting if not s.done), None)
                if running is None:
                    if is_full_of_kept(error, arguments):
                        raise
                    await asyncio.sleep(OVERLOADED_S)
                else:
                    with suppress(TriptychError):  # reported when its turn comes
                        await running.result()
                waiting[0] = arguments, self.submit(**arguments)
                continue
            waiting.popleft()
            return completion

    async def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return the model, its limits, and the limits of the service."""
        return dict((await self._answer(m.GetInfo(), timeout)).info)

    async def stats(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return queues, pages, rates and totals of every stage."""
        return dict((await self._answer(m.GetStats(), timeout)).stats)

    async def status(self, request_id: str, timeout: float = 10.0) -> RequestStatus:
        """Where a request stands; an unknown one has the state "unknown"."""
        return status_of(await self._answer(m.GetStatus(request_id), timeout))

    async def requests(self, limit: int = m.MAX_REQUEST_ROWS, timeout: float = 10.0) -> RequestList:
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
