"""Long replies are encoded in parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site
from tests.launch.gateway.sse import stream
from triptych.launch.gateway.serving import streaming

DUMPS = json.dumps
CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are encoded by one call each."""
    sizes: list[int] = []

    def spy(value: Any, **options: Any) -> str:
        text = DUMPS(value, **options)
        sizes.append(len(text))
        return text

    monkeypatch.setattr("json.dumps", spy)
    return sizes


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 2, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "hi", "logprobs": 2, "echo": True, "prompt_logprobs": 1}),
        ("/v1/responses", {"input": "hi", "top_logprobs": 2}),
    ],
    ids=["chat", "completion", "response"],
)
def test_logprobs_of_a_long_answer_are_encoded_in_parts(
    api: Site, monkeypatch: pytest.MonkeyPatch, sizes: list[int], path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr("triptych.launch.gateway.requests.generation.LONG_TOKENS", 99)
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    asked = {**body, limit: 200, "ignore_eos": True}
    reply = api.http.post(path, content=DUMPS(asked), headers={"content-type": "application/json"})
    assert reply.status_code == 200
    assert reply.content == DUMPS(reply.json(), ensure_ascii=False, separators=(",", ":")).encode()
    assert max(sizes) < len(reply.content) / 3


def test_many_token_ids_are_encoded_in_parts(api: Site, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    monkeypatch.setattr("triptych.launch.gateway.serving.long_json.MANY", 50)
    asked = {"prompt": "hi there " * 100, "return_token_strs": True}
    reply = api.http.post("/tokenize", content=DUMPS(asked), headers={"content-type": "application/json"})
    assert reply.content == DUMPS(reply.json(), ensure_ascii=False, separators=(",", ":")).encode()
    assert len(reply.json()["token_strs"]) == reply.json()["count"] > 150
    assert max(sizes) < len(reply.content) / 3


@pytest.fixture
def event_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of all JSON that is encoded for events of responses; other streams of this gateway may still have events."""
    encode, sizes = streaming._encode, []

    def spy(value: Any) -> str:
        text = encode(value)
        if not isinstance(value, dict) or str(value.get("type")).startswith("response."):
            sizes.append(len(text))
        return text

    monkeypatch.setattr(streaming, "_encode", spy)
    return sizes


def test_logprobs_of_a_streamed_response_are_encoded_once(api: Site, event_sizes: list[int]) -> None:
    """Though the events at its end repeat all of them."""
    tools = [{"type": "function", "name": "f", "parameters": {"type": "message", "id": [], "logprobs": ["kept"]}}]
    body = {"input": "hi", "top_logprobs": 2, "max_output_tokens": 200, "ignore_eos": True, "tools": tools}
    events = [event.data for event in stream(api.http, "/v1/responses", **body)]
    logprobs = [each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]]
    assert len(logprobs) == 200
    *_, text, part, item, response = events
    assert text["logprobs"] == part["part"]["logprobs"] == item["item"]["content"][0]["logprobs"] == logprobs
    assert response["response"]["output"] == [item["item"]]
    assert response["response"]["tools"][0]["parameters"] == tools[0]["parameters"]
    assert sum(event_sizes) < 2 * len(json.dumps(logprobs))


def test_no_events_are_encoded_for_a_response_in_one_piece(api: Site, event_sizes: list[int]) -> None:
    api.http.post("/v1/responses", json={"input": "hi", "top_logprobs": 2}).raise_for_status()
    assert not event_sizes
