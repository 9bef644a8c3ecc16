"""A client whose answers a test writes: for what the hash model would never say."""

from __future__ import annotations

import asyncio
from typing import Any

from triptych.driver.async_client import AsyncStream, Mailbox
from triptych.driver.stream import Completion, Delta
from triptych.protocol.messages import Accepted

STAGES = ("queue", "credit", "schedule", "prefill", "decode")
SUMMARY: dict[str, Any] = {
    "usage": {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0, "truncated_tokens": 0},
    "ledger": {"wall_ms": 50.0, "ttft_ms": 20.0, "stages_ms": dict.fromkeys(STAGES, 10.0)},
    "matched": None,
}


class ScriptedClient:
    """Answers every request with ``pieces``, one delta each, and keeps what was asked."""

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
        """Nothing is open."""

    async def _answer(self, stream: AsyncStream) -> None:
        for number, piece in enumerate(self._pieces):
            stream.on_delta(Delta(piece, [number], number + 1))
            await asyncio.sleep(0)  # so that the pieces are not one
        ids = list(range(len(self._pieces)))
        text = "".join(self._pieces)
        stream.on_end(Completion(stream.request_id, text, ids, self._finish_reason, None, SUMMARY), None)
