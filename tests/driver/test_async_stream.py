"""The stream of the asyncio client, without a pipeline."""

from __future__ import annotations

import asyncio
import gc

from triptych.driver.async_stream import AsyncStream, Mailbox
from triptych.driver.stream import Completion, Delta

END = Completion("r", "", [], "stop", None, {})


def make_stream() -> AsyncStream:
    return AsyncStream("r", None, Mailbox(asyncio.get_running_loop()))  # type: ignore[arg-type] # nothing is sent


def test_delta_that_comes_as_its_reader_is_cancelled_is_left_to_the_next() -> None:
    async def body() -> None:
        stream = make_stream()
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        delta = Delta("a", [1], 1)
        stream.on_delta(delta)
        reader.cancel()
        await asyncio.wait([reader])
        assert reader.cancelled()
        assert await stream.take() == [delta]

    asyncio.run(body())


def test_end_reaches_every_reader_and_those_that_come_later() -> None:
    async def body() -> None:
        stream = make_stream()
        readers = [asyncio.create_task(stream.take()) for _ in range(2)]
        await asyncio.sleep(0)
        stream.on_end(END, None)
        assert await asyncio.gather(*readers) == [[], []]
        assert await stream.take() == []

    asyncio.run(body())


def num_cancelled_futures() -> int:
    kind = type(asyncio.get_running_loop().create_future())
    gc.collect()
    return sum(type(each) is kind and each.cancelled() for each in gc.get_objects())


async def give_up(stream: AsyncStream) -> None:
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])


def test_readers_that_gave_up_leave_nothing_behind() -> None:
    async def body() -> None:
        stream, before = make_stream(), num_cancelled_futures()
        for _ in range(3):
            await give_up(stream)
        assert num_cancelled_futures() <= before
        stream.on_end(END, None)
        assert await stream.take() == []

    asyncio.run(body())
