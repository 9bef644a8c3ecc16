"""Answers written by a test that the hash model would not produce, from a fake client or from the pipeline."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site
from triptych.driver.async_client import AsyncClient
from triptych.driver.async_stream import AsyncStream, Mailbox
from triptych.driver.stream import Completion, Delta
from triptych.protocol.messages import Accepted

STAGES = ("queue", "credit", "schedule", "prefill", "decode")
SUMMARY: dict[str, Any] = {
    "usage": {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0, "truncated_tokens": 0},
    "ledger": {"wall_ms": 50.0, "ttft_ms": 20.0, "stages_ms": dict.fromkeys(STAGES, 10.0)},
    "matched": None,
}

FIRST_TURN = '["user", []]'  # role of the last message, and variables of the template


class ScriptedClient:
    """Answers every request with ``pieces``, one delta each, and records the requests."""

    def __init__(self, *pieces: str, finish_reason: str = "stop") -> None:
        self._pieces = pieces
        self._finish_reason = finish_reason
        self.asked: list[dict[str, Any]] = []

    def submit(self, *, request_id: str, keep: bool = False, **request: Any) -> AsyncStream:
        self.asked.append(request)
        mailbox = Mailbox(asyncio.get_running_loop())
        stream = AsyncStream(request_id, None, mailbox)  # type: ignore[arg-type] # nothing here aborts
        stream.on_accepted(Accepted(request_id, 5, 0, 100))
        asyncio.get_running_loop().create_task(self._answer(stream))
        return stream

    async def close(self) -> None:
        """Nothing to close."""

    async def _answer(self, stream: AsyncStream) -> None:
        for number, piece in enumerate(self._pieces):
            stream.on_delta(Delta(piece, [number], number + 1))
            await asyncio.sleep(0)  # so that there are several pieces
        ids = list(range(len(self._pieces)))
        text = "".join(self._pieces)
        stream.on_end(Completion(stream.request_id, text, ids, self._finish_reason, None, SUMMARY), None)


def script(api: Site, *pieces: str, **options: Any) -> ScriptedClient:
    """Let these pieces be the answer to every request."""
    client = ScriptedClient(*pieces, **options)
    api.gateway.__dict__["client"] = client
    return client


class Dictation:
    """Makes the hash model, whose tokens are bytes, produce a given text, and records the requests."""

    def __init__(self, api: Site, monkeypatch: pytest.MonkeyPatch, text: str, *, is_open: bool = False) -> None:
        """``is_open``: the prompt ends inside reasoning."""
        self.asked: list[dict[str, Any]] = []
        self._client, self._text = api.gateway.client, text
        monkeypatch.setattr(self._client, "submit", self._submit)
        monkeypatch.setattr(api.gateway, "open_prompts", {FIRST_TURN: is_open})

    def _submit(self, **asked: Any) -> AsyncStream:
        self.asked.append(asked)
        form: dict[str, Any] = {"structured": {"choice": [self._text]}} if asked["max_tokens"] != 0 else {}
        return AsyncClient.submit(self._client, **{**form, **asked})
