"""Replies of unknown length for HTTP/1.0, which has no chunks: they end with their connection."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


def until_close(app: ASGIApp, cycle: Any) -> ASGIApp:
    """``app`` for one request, whose uvicorn ``cycle`` would send chunks, which clients take for a part of the text.

    The connection of such a client is closed after the reply anyway.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_endless = False

        async def send_plainly(message: Message) -> None:
            nonlocal is_endless
            if message["type"] == "http.response.start":
                is_endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if is_endless else None
            elif is_endless:
                cycle.expected_content_length = len(message.get("body", b""))  # so that no piece is too long or short
            await send(message)

        await app(scope, receive, send_plainly)

    return answer
