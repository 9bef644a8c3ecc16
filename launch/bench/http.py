"""A minimal client of OpenAI's HTTP API for benchmarks: one connection per request, answers by SSE."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from ...protocol.errors import ConfigError
from .drive import BROKEN, Clock, Failure
from .options import TargetOptions
from .record import Record
from .workload import Query

MAX_ERROR_BYTES = 1 << 16
DELTA_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")  # reasoning and tool calls are tokens too
TIMEOUT_S = 30.0  # to connect, and for the first request


class HttpTarget:
    """An OpenAI-compatible server."""

    def __init__(self, options: TargetOptions, *, body: Mapping[str, Any]) -> None:
        """``body``: the fields of every request besides its prompt and length."""
        assert options.url is not None, "a server has a URL"
        self._url = options.url.rstrip("/").removesuffix("/v1")
        self._is_chat = options.endpoint == "chat"
        self._api_key = options.api_key
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}

    async def first_model(self) -> str:
        """The name of the first model served.

        Raises:
            ConfigError: no server responds there, or not in the form of OpenAI's API.
        """
        try:
            body = await asyncio.wait_for(self._get("/v1/models"), TIMEOUT_S)
            return str(json.loads(body)["data"][0]["id"])
        except Failure as error:
            raise ConfigError(f"{self._url}/v1/models: {error.code}: {error.message}", param="url") from error
        except (*BROKEN, LookupError, TypeError) as error:
            raise ConfigError(f"{self._url}/v1/models: {type(error).__name__}: {error}", param="url") from error

    def set_model(self, name: str) -> None:
        self._body["model"] = name

    async def ask(self, query: Query, record: Record, clock: Clock) -> None:
        body = json.dumps({**self._body, "max_tokens": query.max_tokens, **self._prompt(query)}).encode()
        path = "/v1/chat/completions" if self._is_chat else "/v1/completions"
        is_done = False
        async with self._exchange("POST", path, body) as pieces:
            async for event in _events(pieces):
                if event == b"[DONE]":
                    is_done = True
                    break
                _note(json.loads(event), record, clock())
        if not is_done:
            raise Failure("cut_short", "the stream ended without [DONE]")
        # A server that reports no usage presumably sends one token per event.
        record.num_output_tokens = record.num_output_tokens or len(record.event_times_s)

    async def _get(self, path: str) -> bytes:
        async with self._exchange("GET", path, None) as pieces:
            return b"".join([piece async for piece in pieces])

    def _prompt(self, query: Query) -> dict[str, Any]:
        request = query.request
        if self._is_chat:
            text = request.get("prompt")
            return {"messages": request.get("messages") or [{"role": "user", "content": text}]}
        if "messages" in request:
            raise Failure("invalid_request", "a row with messages needs --endpoint chat")
        return {"prompt": request.get("prompt", request.get("prompt_token_ids"))}

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: bytes | None) -> AsyncIterator[AsyncIterator[bytes]]:
        """The body of a successful reply, in pieces."""
        url = urlsplit(self._url)
        is_tls = url.scheme == "https"
        port, context = url.port or (443 if is_tls else 80), ssl.create_default_context() if is_tls else None
        connecting = asyncio.open_connection(url.hostname, port, ssl=context)
        reader, writer = await asyncio.wait_for(connecting, TIMEOUT_S)
        try:
            writer.write(self._head(method, url.path + path, url.netloc, body) + (body or b""))
            status, headers = await _read_head(reader)
            pieces = _chunks(reader) if "chunked" in headers.get("transfer-encoding", "") else _rest(reader, headers)
            if status != 200:
                raise await _failure(status, pieces)
            yield pieces
        finally:
            writer.close()

    def _head(self, method: str, path: str, host: str, body: bytes | None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", "Accept: */*"]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self._api_key is not None:
            lines.append(f"Authorization: Bearer {self._api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _note(event: dict[str, Any], record: Record, now: float) -> None:
    if error := event.get("error"):
        told = error if isinstance(error, dict) else {"message": error}
        raise Failure(str(told.get("code") or told.get("type") or "error"), str(told.get("message")))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(key) for key in DELTA_KEYS):
            record.event_times_s.append(now)
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    if usage := event.get("usage"):
        record.num_prompt_tokens = usage.get("prompt_tokens", 0)
        record.num_output_tokens = usage.get("completion_tokens", 0)
        record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        own = usage.get("triptych") or {}  # our gateway reports where the time went
        record.stages_ms = next((ledger.get("stages_ms") for ledger in own.get("ledgers") or ()), None)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    parts = (line.partition(":") for line in lines if line)
    return int(status.split()[1]), {name.lower(): value.strip().lower() for name, _, value in parts}


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).partition(b";")[0] or b"0", 16):
        piece = await reader.readexactly(size + 2)
        yield piece[:-2]


async def _rest(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while piece := await reader.read(1 << 16):
        yield piece


async def _failure(status: int, pieces: AsyncIterator[bytes]) -> Failure:
    body = b""
    async for piece in pieces:
        body += piece
        if len(body) > MAX_ERROR_BYTES:
            break
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = body[:200].decode(errors="replace")
    return Failure(f"http_{status}", message)


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event of an SSE stream; comments and other fields are skipped."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
