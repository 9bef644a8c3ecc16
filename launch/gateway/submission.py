"""What one HTTP request asks of the pipeline: a request for each prompt, whose choices are followed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...driver.async_client import AsyncClient, AsyncStream
from ...driver.stream import Completion, Delta
from ...protocol.errors import TriptychError
from .errors import aborted


@dataclass(frozen=True, slots=True)
class Piece:
    """What became known of one choice: new text, or with ``end`` that it is complete."""

    index: int
    deltas: list[Delta]
    end: Completion | None = None


class Choices:
    """Running requests of the pipeline. If one is refused, or a choice fails, all are aborted.

    The choices of a request stand next to each other, so a prompt of ``n`` choices has ``n`` places.
    """

    def __init__(self, requests: Sequence[AsyncStream]) -> None:
        self._requests = list(requests)
        self._streams = [choice for request in requests for choice in request.choices]
        self.num_prompt_tokens = 0  # of all that were accepted

    @classmethod
    async def submit(
        cls, client: AsyncClient, request_id: str, requests: Sequence[Mapping[str, Any]], *, keep: bool = False
    ) -> Choices:
        """Send them all and wait until all are accepted.

        Raises:
            RequestError: one was refused.
        """
        choices = cls([
            client.submit(request_id=f"{request_id}.{index}" if index else request_id, keep=keep, **request)
            for index, request in enumerate(requests)
        ])  # fmt: skip
        try:
            for request in choices._requests:
                choices.num_prompt_tokens += (await request.accepted()).num_prompt_tokens
        except BaseException:
            choices.abort()
            raise
        return choices

    async def results(self) -> list[Completion]:
        """Every whole answer.

        Raises:
            RequestError: one failed, or was ended by the service.
        """
        try:
            return [_checked(await stream.result()) for stream in self._streams]
        except TriptychError:
            self.abort()
            raise

    async def pieces(self, *, interval: int = 1) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come, then the end of each. A piece has ``interval`` tokens or more, but for
        the first and the last of a choice.

        Raises:
            RequestError: one failed; what it had was yielded.
        """
        if len(self._streams) == 1:
            async for piece in _follow(0, self._streams[0], interval):
                yield piece
            return
        queue: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        tasks = [asyncio.create_task(_pump(i, s, interval, queue)) for i, s in enumerate(self._streams)]
        try:
            num_left = len(tasks)
            while num_left:
                found = await queue.get()
                if not isinstance(found, Piece):
                    raise found
                num_left -= found.end is not None
                yield found
        finally:
            for task in tasks:
                task.cancel()

    def abort(self) -> None:
        """End what still runs."""
        for request in self._requests:
            if not request.done:
                request.abort()

    def let_go(self) -> None:
        """Stop following what still runs: it goes on for whoever asks for it."""
        for request in self._requests:
            if not request.done:
                request.let_go()


async def _pump(index: int, stream: AsyncStream, interval: int, queue: asyncio.Queue[Piece | BaseException]) -> None:
    try:
        async for piece in _follow(index, stream, interval):
            queue.put_nowait(piece)
    except Exception as error:  # raised again by whoever reads the queue
        queue.put_nowait(error)


async def _follow(index: int, stream: AsyncStream, interval: int) -> AsyncIterator[Piece]:
    wanted = 1  # the first token is never kept waiting
    while deltas := await stream.take():
        while sum(len(delta.token_ids) for delta in deltas) < wanted and (more := await stream.take()):
            deltas += more
        yield Piece(index, deltas)
        wanted = interval
    yield Piece(index, [], _checked(await stream.result()))


def _checked(completion: Completion) -> Completion:
    if completion.finish_reason == "abort":
        raise aborted()
    return completion
