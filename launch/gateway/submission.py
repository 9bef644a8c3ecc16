"""What one HTTP request asks of the pipeline: a request a choice, followed together."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...driver.async_client import AsyncClient, AsyncStream
from ...driver.stream import Completion, Delta
from ...protocol.errors import TriptychError
from .errors import aborted

GOLDEN = 0x9E3779B97F4A7C15  # spreads the seeds of the choices (Weyl sequence, Steele et al. 2014)


@dataclass(frozen=True, slots=True)
class Piece:
    """What became known of one choice: new text, or with ``end`` that it is complete."""

    index: int
    deltas: list[Delta]
    end: Completion | None = None


def new_id(kind: str, given: str | None = None) -> str:
    """``kind`` is "chatcmpl", "cmpl" or "resp", with the tool parser behind it where calls are looked for."""
    return f"{kind}-{given or uuid.uuid4().hex}"


def choice_id(request_id: str, index: int) -> str:
    """The id in the pipeline of one choice."""
    return f"{request_id}.{index}" if index else request_id


def choice_requests(request: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """One request for each of ``count`` choices: the same with a seed of its own."""
    seed = request.get("seed")
    if seed is None:
        return [dict(request) for _ in range(count)]
    return [{**request, "seed": (seed + index * GOLDEN) % (1 << 63)} for index in range(count)]


class Choices:
    """Running requests of the pipeline, in the order of the choices. If one is refused or fails, all are aborted."""

    def __init__(self, streams: Sequence[AsyncStream]) -> None:
        self.streams = list(streams)

    @classmethod
    async def submit(
        cls, client: AsyncClient, request_id: str, requests: Sequence[Mapping[str, Any]], *, keep: bool = False
    ) -> Choices:
        """Send them all and wait until all are accepted.

        Raises:
            RequestError: one was refused.
        """
        choices = cls([
            client.submit(request_id=choice_id(request_id, index), keep=keep, **request)
            for index, request in enumerate(requests)
        ])  # fmt: skip
        try:
            for stream in choices.streams:
                await stream.accepted()
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
            return [_checked(await stream.result()) for stream in self.streams]
        except TriptychError:
            self.abort()
            raise

    async def pieces(self, *, interval: int = 1) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come, then the end of each. A piece has ``interval`` tokens or more, but for
        the first and the last of a choice.

        Raises:
            RequestError: one failed; what it had was yielded.
        """
        if len(self.streams) == 1:
            async for piece in _follow(0, self.streams[0], interval):
                yield piece
            return
        queue: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        tasks = [asyncio.create_task(_pump(i, s, interval, queue)) for i, s in enumerate(self.streams)]
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
        for stream in self.streams:
            if not stream.done:
                stream.abort()

    def let_go(self) -> None:
        """Stop following what still runs: it goes on for whoever asks for it."""
        for stream in self.streams:
            if not stream.done:
                stream.let_go()


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
