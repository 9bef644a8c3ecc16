"""A pipeline measured over ZeroMQ, like any client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...driver.async_client import AsyncClient
from .drive import Clock
from .record import Record
from .workload import Query


class PipelineTarget:
    """Our own pipeline, or one that is already running."""

    def __init__(self, client: AsyncClient, *, options: Mapping[str, Any]) -> None:
        """``options``: the sampling parameters of every request besides its length."""
        self._client, self._options = client, options

    async def ask(self, query: Query, record: Record, clock: Clock) -> None:
        request = {"prompt": query.request.get("prompt_token_ids"), **query.request}
        request.pop("prompt_token_ids", None)
        stream = self._client.submit(**request, max_tokens=query.max_tokens, **self._options)
        try:
            async for delta in stream:
                if delta.token_ids:
                    record.event_times_s.append(clock())
            completion = await stream.result()
        finally:
            if not stream.done:
                stream.abort()
        record.finish_reason = completion.finish_reason
        record.num_prompt_tokens = completion.usage["prompt_tokens"]
        record.num_output_tokens = completion.usage["completion_tokens"]
        record.num_cached_tokens = completion.usage["cached_tokens"]
        record.stages_ms = completion.ledger["stages_ms"]
