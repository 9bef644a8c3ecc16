"""An OpenAI-compatible server in one file, whose answers are set by a test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeOpenAI:
    """Streams ``max_tokens`` events per request. ``asked``: the bodies it received."""

    token_s: float = 0.002
    status: int = 200
    with_usage: bool = True
    delta_key: str = "content"  # of the text in a chat's events
    stages_ms: dict[str, float] | None = None  # sent as our gateway sends them
    error: Any = None  # in every event; None: no usage
    cut_after: int | None = None  # number of events after which the connection is closed
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(head)
        length = next((int(line.split(":")[1]) for line in head.splitlines() if line.startswith("Content-Length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else None
        if body is None:
            await self._reply(writer, 200, {"object": "list", "data": [{"id": "fake-model"}]})
        elif self.status != 200:
            await self._reply(writer, self.status, {"error": {"message": "no room", "type": "overloaded"}})
        else:
            self.asked.append(body)
            await self._stream(writer, body, is_chat="chat" in head.splitlines()[0])
        writer.close()

    async def _reply(self, writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_chat: bool) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")
        if is_chat:
            self._send(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(body["max_tokens"]):
            if index == self.cut_after:
                return
            await asyncio.sleep(self.token_s)
            choice = {"delta": {self.delta_key: "x"}} if is_chat else {"text": "x"}
            self._send(writer, {"choices": [choice], "error": self.error})
            await writer.drain()
        self._send(writer, {"choices": [{"text": "", "delta": {}, "finish_reason": "length"}]})
        if self.with_usage:
            usage: dict[str, Any] = {"prompt_tokens": 11, "completion_tokens": body["max_tokens"]}
            usage["prompt_tokens_details"] = {"cached_tokens": 3}
            if self.stages_ms is not None:
                usage["triptych"] = {"ledgers": [{"stages_ms": self.stages_ms}]}
            self._send(writer, {"choices": [], "usage": usage})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _send(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        # Cut in the middle, as a network may do.
        data = b": a comment\n\ndata: " + json.dumps(event).encode() + b"\r\n\r\n"
        self._chunk(writer, data[:20])
        self._chunk(writer, data[20:])

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def serving(server: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """The server on a free port, in its own thread, until the block ends."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    stop: list[Callable[[], Any]] = []

    async def run() -> None:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        stopped = asyncio.Event()
        stop.append(stopped.set)
        ready.set()
        await stopped.wait()
        listening.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop[0])
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.close()
