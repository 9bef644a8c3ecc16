"""An HTTP request that needs more than the pipeline accepts at once, and the other requests of its gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.scripted import SUMMARY
from tests.launch.gateway.sse import stream
from tests.waiting import eventually
from triptych import Driver
from triptych.driver.async_stream import AsyncStream, Mailbox
from triptych.driver.stream import Completion
from triptych.launch.gateway.requests.option_scores import OptionScorer, together
from triptych.launch.gateway.requests.submission import MAX_IN_FLIGHT, Choices
from triptych.protocol.errors import InvalidRequest, Overloaded, TriptychError
from triptych.protocol.messages import Accepted

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def narrow() -> Iterator[Site]:
    """A pipeline that accepts only as many requests of the gateway as one HTTP request may have in flight."""
    with Driver("hash-lm", max_client_requests=MAX_IN_FLIGHT) as driver, site(driver.run_dir) as api:
        yield api


def prompts(count: int) -> list[list[int]]:
    return [[5, 6, number] for number in range(count)]


def texts(reply: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in reply["choices"]]


def reply_if_accepted(api: Site, **body: Any) -> dict[str, Any] | None:
    """The reply, or None while earlier requests still count."""
    reply = api.post(PATH, **body)
    assert reply.status_code in (200, 429), reply.text
    return dict(reply.json()) if reply.status_code == 200 else None


def test_many_prompts_are_answered_a_few_at_a_time(narrow: Site) -> None:
    asked: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
    found = texts(narrow.ask(PATH, prompt=prompts(200), **asked))
    for number in (0, 70, 199):
        wanted = {"prompt": prompts(200)[number], **asked}
        reply = eventually(partial(reply_if_accepted, narrow, **wanted))
        assert texts(reply) == [found[number]]
    by_index: dict[int, str] = dict.fromkeys(range(200), "")
    for event in stream(narrow.http, PATH, prompt=prompts(200), **asked)[:-1]:
        [choice] = event.data["choices"]
        by_index[choice["index"]] += choice["text"]
    assert list(by_index.values()) == found


def test_prompts_with_several_choices_count_once_per_choice(narrow: Site) -> None:
    reply = narrow.ask(PATH, prompt=prompts(10), max_tokens=2, n=16, seed=3, temperature=1)
    assert [choice["index"] for choice in reply["choices"]] == list(range(160))


def test_refused_prompt_aborts_the_others(narrow: Site) -> None:
    status, error = narrow.refusal(PATH, prompt=[*prompts(100), [999_999]], max_tokens=2)
    assert (status, error["param"]) == (400, "prompt")
    assert narrow.ask(PATH, prompt=prompts(MAX_IN_FLIGHT), max_tokens=2)


def test_queue_may_be_shorter_than_the_list_of_prompts() -> None:
    with Driver("hash-lm", max_queue=2, max_num_seqs=2) as short, site(short.run_dir) as api:
        assert len(texts(api.ask(PATH, prompt=prompts(40), max_tokens=2))) == 40


class Refuser:
    """A client whose streams are ended by the test."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[AsyncStream] = asyncio.Queue()

    def submit(self, *, request_id: str, **_: Any) -> AsyncStream:
        stream = AsyncStream(request_id, None, Mailbox(asyncio.get_running_loop()))  # type: ignore[arg-type]
        self.sent.put_nowait(stream)
        return stream


async def answer(stream: AsyncStream, error: TriptychError | None = None) -> None:
    """Accept and end a request, or refuse it, and notify the waiting tasks."""
    if error is None:
        stream.on_accepted(Accepted(stream.request_id, 1, 0, 1))
    stream.on_end(Completion(stream.request_id, "", [], "stop", None, SUMMARY), error)
    for _ in range(10):
        await asyncio.sleep(0)


def test_prompt_waiting_for_space_does_not_wait_for_a_refused_one() -> None:
    async def ask() -> None:
        client = Refuser()
        asked = asyncio.create_task(Choices.submit(client, "x", [{}, {}, {}]))  # type: ignore[arg-type]
        first, second, third = [await client.sent.get() for _ in range(3)]
        await answer(first)
        await answer(second, Overloaded("full"))
        await answer(third, InvalidRequest("no"))
        await answer(await asyncio.wait_for(client.sent.get(), 10))
        with pytest.raises(InvalidRequest):
            await asyncio.wait_for(asked, 10)

    asyncio.run(ask())


def test_options_are_scored_a_few_at_a_time() -> None:
    async def ask() -> None:
        client = Refuser()
        scorer = OptionScorer(SimpleNamespace(client=client), "dec", {}, param="questions")  # type: ignore[arg-type]
        asked = [asyncio.create_task(scorer.prompt_ids({})) for _ in range(2 * MAX_IN_FLIGHT)]
        await asyncio.sleep(0)
        for num_ended in range(MAX_IN_FLIGHT):
            assert client.sent.qsize() == MAX_IN_FLIGHT, f"{num_ended} have ended"
            await answer(client.sent.get_nowait(), InvalidRequest("no"))
        await together(answer(client.sent.get_nowait(), InvalidRequest("no")) for _ in range(MAX_IN_FLIGHT))
        assert {type(error) for error in await asyncio.gather(*asked, return_exceptions=True)} == {InvalidRequest}

    asyncio.run(ask())


@pytest.mark.parametrize("refused", [0, 1])
def test_retried_prompt_gets_a_new_id(refused: int) -> None:
    """A repetition of the first attempt may still be accepted, and aborted by its client: then its id is used up."""

    async def ask() -> list[str]:
        client = Refuser()
        asked = asyncio.create_task(Choices.submit(client, "x", [{}, {}]))  # type: ignore[arg-type]
        sent = [await client.sent.get() for _ in range(2)]
        await answer(sent[1 - refused])
        await answer(sent[refused], Overloaded("full"))
        sent.append(await asyncio.wait_for(client.sent.get(), 10))
        await answer(sent[2])
        await asyncio.wait_for(asked, 10)
        return [stream.request_id for stream in sent]

    assert len(set(asyncio.run(ask()))) == 3
