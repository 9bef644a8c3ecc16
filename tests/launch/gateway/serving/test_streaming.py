"""A stream of events as the server sends it, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from triptych.launch.gateway.serving import streaming
from triptych.launch.gateway.serving.streaming import COMMENT, COMMENT_AMONG_IDS, EventStream, event


@pytest.mark.parametrize(
    ("event_id", "comment"), [(None, COMMENT), ("1", COMMENT_AMONG_IDS)], ids=["without ids", "with ids"]
)
def test_silent_stream_gets_comments_that_are_no_events(
    monkeypatch: pytest.MonkeyPatch, event_id: str | None, comment: bytes
) -> None:
    monkeypatch.setattr(streaming, "SILENCE_S", 0.001)
    sent: list[bytes] = []

    async def serve() -> None:
        has_waited = asyncio.Event()

        async def events() -> AsyncIterator[bytes]:
            yield event("first", event_id=event_id)
            await has_waited.wait()
            yield event("second", event_id=event_id)

        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))
            if sent[-2:] == [comment] * 2:
                has_waited.set()

        stream = EventStream(events(), on_close=lambda: None, timeout_s=10.0, comment=comment)
        await stream({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]  # nobody disconnects

    asyncio.run(serve())
    stream = b"".join(sent)
    assert stream.count(comment) == 2
    if event_id is not None:  # OpenAI's client then reads an event wherever there is an empty line
        assert all(b"data: " in block for block in stream.removesuffix(b"\n\n").split(b"\n\n"))


def test_client_that_does_not_read_gets_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SILENCE_S", 0.0)
    sent: list[bytes] = []

    async def serve() -> None:
        async def events() -> AsyncIterator[bytes]:
            yield event("all")

        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))
            for _ in range(20):  # silences, in each of which a comment would be due
                await asyncio.sleep(0)

        stream = EventStream(events(), on_close=lambda: None, timeout_s=10.0)
        await stream({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]  # nobody disconnects

    asyncio.run(serve())
    assert sent == [b"", event("all"), b""]


def test_all_parts_but_the_last_go_straight_to_the_server() -> None:
    through_all: list[bytes] = []
    straight: list[bytes] = []

    async def serve() -> None:
        async def events() -> AsyncIterator[bytes]:
            yield b"first"
            yield b"second"

        async def send(message: Message) -> None:
            through_all.append(message.get("body", b"start"))

        async def send_more(message: Message) -> None:
            straight.append(message["body"])

        stream = EventStream(events(), on_close=lambda: None, timeout_s=10.0)
        scope = {"type": "http", "state": {"send_more": send_more}}
        await stream(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]  # nobody disconnects

    asyncio.run(serve())
    assert (through_all, straight) == ([b"start", b""], [b"first", b"second"])
