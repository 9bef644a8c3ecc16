"""Bodies that are no JSON, or contain too much of it, are refused at once and with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tests.launch.gateway.conftest import Site
from triptych.launch.gateway.schemas.chat import ChatRequest
from triptych.launch.gateway.schemas.completions import CompletionRequest
from triptych.launch.gateway.schemas.other import DetokenizeRequest, TokenizeRequest
from triptych.launch.gateway.schemas.responses import ResponseRequest

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff"])
def test_body_that_is_not_a_map_is_a_400(api: Site, body: bytes) -> None:
    reply = api.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


BROKEN = [
    (b'{"prompt": "hi",,', "invalid_json", "at character 16"),
    (b'{"prompt": "\xff"}', "bad_request", "cannot be read as utf-8: byte 0xff at offset 12"),
    (b'{"prompt": ' + b"[" * 100_000, "bad_frame", "nested too deep to be read"),
    (b'{"seed": ' + b"1" * 5000 + b"}", "bad_request", "the limit (4300"),
]


@pytest.mark.parametrize(("body", "code", "reason"), BROKEN, ids=["a comma", "latin-1", "lists", "digits"])
def test_unreadable_body_is_refused_with_the_reason(api: Site, body: bytes, code: str, reason: str) -> None:
    reply = api.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
    assert reason in reply.json()["error"]["message"]


def test_compressed_body_is_refused_as_such(api: Site) -> None:
    reply = api.http.post(COMPLETIONS, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_body_without_a_json_content_type_is_refused_with_advice(api: Site, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    reply = api.http.post(CHAT, content=b'{"messages": [{"role": "user", "content": "a secret"}]}', headers=headers)
    assert reply.status_code == 400
    assert "content-type: application/json" in reply.json()["error"]["message"]
    assert "secret" not in reply.text


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN"])
def test_non_json_numbers_are_refused_and_not_echoed(api: Site, number: str) -> None:
    """1e400 is valid JSON, but Python reads it as infinity and would write ``Infinity``, which is not JSON."""
    tool = '{"type": "function", "name": "f", "parameters": {"maximum": ' + number + "}}"
    body = '{"input": "hi", "max_output_tokens": 1, "tools": [' + tool + "]}"
    reply = api.http.post(RESPONSES, content=body.encode(), headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools[0].parameters")


def test_too_deeply_nested_field_is_refused_as_documented(api: Site) -> None:
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    status, error = api.refusal(CHAT, messages=MESSAGES, max_tokens=1, chat_template_kwargs={"a": deep})
    assert (status, error["code"]) == (400, "bad_frame")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [""] * 100_000 + [1]}),
        (COMPLETIONS, {"prompt": [1] * 100_000 + [""]}),
        (COMPLETIONS, {"prompt": [[1]] * 1025}),
        (COMPLETIONS, {"prompt": "a", **{f"x{number}": 1 for number in range(10_000)}}),
        (CHAT, {"messages": MESSAGES, "stop_token_ids": ["x"] * 100_000}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1025}]}),
        (RESPONSES, {"input": [{"rank": 1}] * 100_000}),
        ("/tokenize", {"messages": [{"a": 1, "b": 2}] * 100_000}),
        ("/detokenize", {"tokens": ["a"] * 100_000}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(number): "x" for number in range(10_000)}}),
        (RESPONSES, {"input": "a", "metadata": {str(number): 1 for number in range(10_000)}}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(list(value)[:2]),
)
def test_error_of_a_million_faults_is_short(path: str, body: dict[str, Any]) -> None:
    models: dict[str, type[BaseModel]] = {
        COMPLETIONS: CompletionRequest, CHAT: ChatRequest, RESPONSES: ResponseRequest,
              "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}  # fmt: skip
    with pytest.raises(ValidationError) as refusal:
        models[path].model_validate(body)
    assert refusal.value.error_count() <= 8


PARTS = [{"type": "text", "text": "a"}] * 1000


@pytest.mark.parametrize(
    ("path", "param", "turn"),
    [
        (CHAT, "messages", {"role": "user", "content": PARTS}),
        (CHAT, "messages", {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": ""}}] * 1000}),
        (RESPONSES, "input", {"role": "user", "content": PARTS}),
        ("/v1/messages", "messages", {"role": "user", "content": PARTS}),
        ("/v1/messages", "messages", {"role": "user", "content": [{"type": "tool_result", "content": PARTS}]}),
        ("/tokenize", "messages", {"role": "user", "content": PARTS}),
        ("/v1/decisions", "input", {"role": "user", "content": PARTS}),
    ],
)
def test_conversation_with_too_many_parts_is_refused_before_they_are_validated(
    api: Site, path: str, param: str, turn: dict[str, Any]
) -> None:
    """Validating three hundred thousand, which fit into a body, blocked the gateway for seven seconds."""
    status, error = api.refusal(path, **{param: [turn] * 9})
    text = f"{param}: more than 8192 messages, parts and calls, the limit"
    assert (status, error["message"], error["param"]) == (400, text, param)


def test_decision_with_too_many_choices_is_refused_before_they_are_validated(api: Site) -> None:
    """Validating a hundred thousand, within the limits of each question, blocked the gateway for half a second."""
    question = {"instructions": "Which?", "choices": [{"value": str(i)} for i in range(255)]}
    status, error = api.refusal("/v1/decisions", state="a", questions=[question] * 400)
    text = "questions: more than 8192 questions and choices, the limit"
    assert (status, error["message"], error["param"]) == (400, text, "questions")
