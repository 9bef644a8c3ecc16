"""Long replies are encoded in parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site

CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}


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
    api: Site, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    dumps, sizes = json.dumps, []

    def spy(value: Any, **options: Any) -> str:
        text = dumps(value, **options)
        sizes.append(len(text))
        return text

    monkeypatch.setattr("json.dumps", spy)
    monkeypatch.setattr("triptych.launch.gateway.generation.LONG_TOKENS", 99)
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    asked = {**body, limit: 200, "ignore_eos": True}
    reply = api.http.post(path, content=dumps(asked), headers={"content-type": "application/json"})
    assert reply.status_code == 200
    assert reply.content == dumps(reply.json(), ensure_ascii=False, separators=(",", ":")).encode()
    assert max(sizes) < len(reply.content) / 3
