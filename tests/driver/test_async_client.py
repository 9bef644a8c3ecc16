"""The client for asyncio: the same requests, awaited."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.driver.test_client import tokens_after
from tests.waiting import eventually
from triptych import AsyncClient, Client, Driver
from triptych.driver.stream import Completion, Delta
from triptych.protocol.errors import (
    DuplicateId,
    InvalidRequest,
    RequestTimeout,
    UnknownRequest,
)


def with_client(driver: Driver, body: Callable[[AsyncClient], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with AsyncClient(driver.run_dir) as client:
            await asyncio.wait_for(body(client), 30)

    asyncio.run(run())


def test_deltas_are_iterated_with_async_for(driver: Driver) -> None:
    async def body(client: AsyncClient) -> None:
        stream = client.submit([5, 6, 7], max_tokens=20)
        assert (await stream.accepted()).max_tokens == 20
        deltas = [delta async for delta in stream]
        assert [token for delta in deltas for token in delta.token_ids] == tokens_after([5, 6, 7], 20)
        assert (await stream.result()).text == "".join(delta.text for delta in deltas)
        assert stream.done

    with_client(driver, body)


def test_iterating_again_ends_at_once(driver: Driver) -> None:
    async def body(client: AsyncClient) -> None:
        stream = client.submit([5], max_tokens=3)
        first: list[Delta] = [delta async for delta in stream]
        again: list[Delta] = [delta async for delta in stream]
        assert (bool(first), again) == (True, [])

    with_client(driver, body)


def test_all_prompts_are_answered_in_order_though_the_queue_is_full_at_times(driver: Driver) -> None:
    before = driver.stats()["prepare"]["rejected"].get("overloaded", 0)
    lengths = [1 + 7 * i % 11 for i in range(1, 41)]

    async def body(client: AsyncClient) -> None:
        asked = [{"prompt": [i], "max_tokens": n} for i, n in enumerate(lengths, 1)]
        received: list[Completion] = []
        assert await client.generate_all(asked, progress=received.append, max_tokens=99) == received
        assert [answer.token_ids for answer in received] == [tokens_after([i], n) for i, n in enumerate(lengths, 1)]
        assert await client.generate_all([]) == []

    with_client(driver, body)
    eventually(lambda: driver.stats()["prepare"]["rejected"]["overloaded"] > before)


@pytest.mark.parametrize("ends", ["one is refused", "the caller is cancelled"])
def test_refused_or_cancelled_generate_all_aborts_all_its_requests(ends: str, driver: Driver) -> None:
    def num_aborted() -> int:
        return int(driver.stats()["summarize"]["finished"]["abort"])

    is_refused = ends == "one is refused"
    before = num_aborted()

    async def body(client: AsyncClient) -> None:
        prompts = [{"prompt": [5], "top_p": 2.0} if is_refused else [5], [6], [7]]
        call = asyncio.create_task(client.generate_all(prompts, max_tokens=4000))
        while not is_refused and len((await client.requests()).lines) < len(prompts):
            await asyncio.sleep(0)
        if not is_refused:
            call.cancel()
        with pytest.raises((InvalidRequest, asyncio.CancelledError)):
            await call
        await asyncio.to_thread(eventually, lambda: num_aborted() >= before + len(prompts) - is_refused)

    with_client(driver, body)


@pytest.mark.parametrize("many", [False, True], ids=["one", "a list"])
def test_cancelled_wait_for_a_kept_request_lets_it_go_on(many: bool, driver: Driver) -> None:
    async def body(client: AsyncClient) -> None:
        options: dict[str, Any] = {"max_tokens": 400, "keep": True, "request_id": f"kept-{many}"}
        call = asyncio.create_task(client.generate_all([[5]], **options) if many else client.generate([5], **options))
        while (await client.status(f"kept-{many}")).state == "unknown":
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    with_client(driver, body)
    assert driver.client.resume(f"kept-{many}").result(20).token_ids == tokens_after([5], 400)


def test_closing_a_stream_refused_for_its_id_does_not_end_the_live_request(driver: Driver) -> None:
    async def body(client: AsyncClient) -> None:
        first = client.submit([5], max_tokens=200, request_id="taken")
        await first.accepted()
        second = client.submit([6], max_tokens=200, request_id="taken")
        second.abort()  # before the refusal arrives
        with pytest.raises(DuplicateId):
            await second.result()
        assert (await first.result()).finish_reason == "length"

    with_client(driver, body)


@pytest.mark.parametrize("n", [1, 2])
def test_stream_whose_request_was_taken_over_does_not_abort_it(driver: Driver, n: int) -> None:
    async def body(client: AsyncClient) -> None:
        first = client.submit([5], max_tokens=200, request_id=f"moved-{n}", n=n, keep=True)
        await first.accepted()
        client.detach(f"moved-{n}", DuplicateId("another reader has it"))
        second = client.resume(f"moved-{n}", n=n)
        first.abort()
        assert (await second.result()).finish_reason == "length"

    with_client(driver, body)


def test_refusal_is_raised_wherever_it_is_awaited(driver: Driver) -> None:
    async def body(client: AsyncClient) -> None:
        stream = client.submit([5], top_p=2.0)
        for awaited in (stream.accepted(), stream.result()):
            with pytest.raises(InvalidRequest, match="top_p"):
                await awaited
        with pytest.raises(InvalidRequest, match="top_p"):
            [delta async for delta in stream]

    with_client(driver, body)


def test_cancelling_the_wait_for_an_answer_aborts_the_request(driver: Driver) -> None:
    async def body(client: AsyncClient) -> None:
        aborted = (await client.stats())["summarize"]["finished"]["abort"]
        task = asyncio.create_task(client.generate([5], max_tokens=4000, request_id="cancelled"))
        while (await client.status("cancelled")).state != "running":
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while (await client.stats())["summarize"]["finished"]["abort"] == aborted:
            await asyncio.sleep(0.01)

    with_client(driver, body)


def test_task_cancelled_while_the_client_closes_is_cancelled() -> None:
    async def body(client: Client) -> None:
        waiting = asyncio.create_task(AsyncClient(client=client).generate("hello"))
        await asyncio.sleep(0)
        client.close()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(body(Client(folder)))


def test_stream_can_be_aborted_after_its_client_was_closed() -> None:
    """As in the finally of a handler that is cancelled at the end of its program: it has to stay cancelled."""

    async def body() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with AsyncClient(folder) as client:
                stream, sync = client.submit([5]), client._client.submit([6])
            stream.abort()
            sync.abort()

    asyncio.run(body())


def test_after_a_cancelled_wait_the_result_can_be_awaited_again(driver: Driver) -> None:
    async def body(client: AsyncClient) -> None:
        stream = client.submit([5], max_tokens=20)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stream.result(), 0)
        assert (await stream.result()).token_ids == tokens_after([5], 20)

    with_client(driver, body)


def test_abort_ends_an_async_stream(driver: Driver) -> None:
    async def body(client: AsyncClient) -> None:
        stream = client.submit([5], max_tokens=4000)
        await stream.accepted()
        stream.abort()
        assert (await stream.result()).finish_reason == "abort"

    with_client(driver, body)


def test_acceptance_of_a_resumed_request_was_told_to_another(driver: Driver) -> None:
    async def body(client: AsyncClient) -> None:
        await client.submit([5], max_tokens=2, request_id="told", keep=True).result()
        with pytest.raises(InvalidRequest, match="who submitted it was told"):
            await client.resume("told", keep=True).accepted()
        with pytest.raises(InvalidRequest, match="who submitted it was told"):
            driver.resume("told").accepted(20)

    with_client(driver, body)


def test_resuming_an_unknown_request_is_an_error_in_asyncio_too(driver: Driver) -> None:
    async def body(client: AsyncClient) -> None:
        with pytest.raises(UnknownRequest):
            await client.resume("never heard of").result()
        assert (await client.info())["model"]["model_type"] == "hash-lm"

    with_client(driver, body)


def test_closed_event_loop_disturbs_no_other_client(driver: Driver) -> None:
    """Its request continues and ends with no one to receive it."""
    client = Client(driver.run_dir)

    async def leave_early() -> None:
        async_client = AsyncClient(client=client)
        async_client.submit([5], max_tokens=50)

    asyncio.run(leave_early())
    assert client.generate([5], max_tokens=60).token_ids == tokens_after([5], 60)
    client.close()


def test_unanswered_async_question_times_out() -> None:
    async def ask(folder: str) -> None:
        async with AsyncClient(folder) as client:
            await client.requests(timeout=0.05)

    with tempfile.TemporaryDirectory() as folder, pytest.raises(RequestTimeout) as caught:
        asyncio.run(ask(folder))
    assert caught.value.message == "GetRequests: no answer within 0.05 s"


def test_async_questions_use_no_threads(driver: Driver) -> None:
    async def body(client: AsyncClient) -> None:
        before = threading.enumerate()
        found = await asyncio.gather(*(client.status(f"q{number}") for number in range(50)))
        assert {status.state for status in found} == {"unknown"}
        assert (await client.info())["model"]["model"] == "hash-lm"
        new = [thread.name for thread in threading.enumerate() if thread not in before]
        assert [
            name for name in new if name.startswith("asyncio")
        ] == []  # the driver may start other threads at any time

    with_client(driver, body)
