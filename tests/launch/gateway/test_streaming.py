"""A stream of events as the server sends it, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from triptych.launch.gateway import streaming
from triptych.launch.gateway.streaming import COMMENT, EventStream


def test_silent_stream_gets_comments_until_its_next_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SILENCE_S", 0.001)
    sent: list[bytes] = []

    async def serve() -> None:
        has_waited = asyncio.Event()

        async def events() -> AsyncIterator[bytes]:
            yield b"first"
            await has_waited.wait()
            yield b"second"

        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))
            if sent[-2:] == [COMMENT] * 2:
                has_waited.set()

        stream = EventStream(events(), on_close=lambda: None, timeout_s=10.0)
        await stream({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]  # nobody disconnects

    asyncio.run(serve())
    assert sent == [b"", b"first", COMMENT, COMMENT, b"second", b""]
