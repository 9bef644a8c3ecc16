"""Nothing of a request is left when it has ended, without a search for garbage, which a gateway seldom makes."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site
from tests.waiting import eventually
from triptych.driver.async_stream import AsyncStream
from triptych.launch.gateway.schemas.completions import CompletionRequest

LONG = {"max_tokens": 4000, "ignore_eos": True, "deadline_ms": 300}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("asked", "num_events"),
    [({"max_tokens": 5}, 1), ({"prompt": "hi" * 10_000}, 0), (LONG, 1), ({"max_tokens": "many"}, 0)],
    ids=["answered", "refused by the pipeline", "failed", "refused by the gateway"],
)
def test_ended_request_leaves_no_garbage(api: Site, asked: dict[str, Any], num_events: int, stream: bool) -> None:
    body = {"prompt": "hi", "stream": stream, **asked}
    api.post("/v1/completions", **body)
    gc.collect()
    gc.disable()
    try:
        reply = api.post("/v1/completions", **body)
        assert ("data: " in reply.text) == (stream and bool(num_events))
        eventually(lambda: not any(isinstance(each, (CompletionRequest, AsyncStream)) for each in gc.get_objects()))
    finally:
        gc.enable()
