"""/v1/chat/completions."""

from __future__ import annotations

import json
import math
import time

import pytest

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.sse import events, stream, text_of
from triptych import Driver
from triptych.launch.gateway.openai.logprobs import chat_logprobs, completion_logprobs

PATH = "/v1/chat/completions"
LEN = [{"role": "user", "content": "What does len do?"}]
ANSWER = "Return the number of items in a container."


def test_chat_is_answered(demo: Site) -> None:
    reply = demo.ask(PATH, model="demo", messages=LEN, temperature=0)
    [choice] = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == ANSWER
    assert (choice["finish_reason"], reply["object"]) == ("stop", "chat.completion")
    assert reply["id"].startswith("chatcmpl-")


def test_stream_begins_with_the_role_and_ends_with_the_reason(demo: Site) -> None:
    found = stream(demo.http, PATH, messages=LEN, temperature=0, stream_options={"include_usage": True})
    assert text_of(found) == ANSWER
    first, *_, last, usage, done = (event.data for event in found)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert (usage["choices"], done) == ([], "[DONE]")
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert {event.data["object"] for event in found[:-1]} == {"chat.completion.chunk"}
    assert len({event.data["id"] for event in found[:-1]}) == 1


def test_stream_does_not_begin_before_its_first_token(slow: Driver) -> None:
    """Load generators take the first chunk, whatever is in it, for the first token."""
    wanted = {"messages": [{"role": "user", "content": "x" * 3000}], "max_tokens": 2, "stream": True}
    with site(slow.run_dir) as api:
        api.ask(PATH, messages=LEN, max_tokens=1)  # the first request to a gateway takes longer than the prompt
        began = time.monotonic()
        with api.http.stream("POST", PATH, json={**wanted, "stream_options": {"include_usage": True}}) as reply:
            found = events(reply)
            first, waited_ms = next(found), (time.monotonic() - began) * 1e3
            *_, usage, _ = found
    assert first.data["choices"][0]["delta"]["role"] == "assistant"
    assert waited_ms > usage.data["usage"]["triptych"]["ledgers"][0]["ttft_ms"]


def test_resumable_stream_begins_at_once_with_its_id(slow: Driver) -> None:
    """Without it, a client that named no ``request_id`` could resume nothing."""
    wanted = {"messages": LEN, "max_tokens": 20, "resumable": True}
    with site(slow.run_dir) as api:
        first, *_ = stream(api.http, PATH, **wanted)
        assert (first.id, first.data["choices"][0]["delta"]["role"]) == ("0", "assistant")
        assert api.http.delete(f"/v1/requests/{first.data['id']}").status_code == 200


def test_several_choices_are_streamed_with_their_indices(api: Site) -> None:
    wanted = {"messages": LEN, "n": 3, "max_tokens": 10, "seed": 1}
    whole = api.ask(PATH, **wanted)
    found = stream(api.http, PATH, **wanted)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [text_of(found, index) for index in range(3)] == texts
    ends = [c["index"] for e in found[:-1] for c in e.data["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


def test_max_tokens_is_accepted_for_max_completion_tokens(api: Site) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        assert api.ask(PATH, messages=LEN, **{name: 7})["usage"]["completion_tokens"] == 7


def test_extra_fields_of_messages_are_ignored(api: Site) -> None:
    """Parsed content added by openai's helpers; fields of other services added by litellm and OpenRouter."""
    mark = {"cache_control": {"type": "ephemeral"}}
    added = {"parsed": {"a": 1}, "provider_specific_fields": {}, "thinking_blocks": [], "reasoning_details": [{"a": 1}]}
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "a", "type": "function", "function": function, "provider_specific_fields": {}, "extra_content": {}}
    message = {"role": "assistant", "content": [{"type": "text", "text": "a", **mark}], "tool_calls": [call], **added}
    plain = {
        "role": "assistant",
        "content": "a",
        "tool_calls": [{**call, "function": {"name": "f", "arguments": "{}"}}],
    }
    tools = [{"type": "function", "function": {"name": "f"}, **mark}]
    asked = {"tools": tools, "tool_choice": "none", "max_tokens": 1}
    replies = [api.ask(PATH, messages=[{**LEN[0], **mark}, each], **asked) for each in (message, plain)]
    assert replies[0]["usage"]["prompt_tokens"] == replies[1]["usage"]["prompt_tokens"]


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_have_bytes_and_alternatives(demo: Site, count: int) -> None:
    wanted = {"messages": LEN, "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": count}
    [choice] = demo.ask(PATH, **wanted)["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == count for entry in content)
    streamed = stream(demo.http, PATH, **wanted)
    rows = [c["logprobs"]["content"] for e in streamed[:-1] for c in e.data["choices"] if c["logprobs"]]
    assert [entry["token"] for row in rows for entry in row] == [entry["token"] for entry in content]


def test_characters_of_several_tokens_arrive_complete(demo: Site) -> None:
    text = "grüße 你好 👩‍👩‍👧"
    ids = demo.gateway.words.encode(text, add_special_tokens=False)
    assert demo.gateway.words.decode(ids) == text
    assert b"".join(demo.gateway.words.bytes_of(i) for i in ids).decode() == text


def test_error_raised_by_the_template_is_a_400(demo: Site) -> None:
    status, error = demo.refusal(PATH, messages=[{"role": "wizard", "content": "hi"}])
    assert (status, error["code"], error["param"]) == (400, "tokenization_failed", "messages")
    assert "wizard" in error["message"]


def test_logprob_of_minus_infinity_is_sent_as_a_valid_number(demo: Site) -> None:
    rows = [[-math.inf, [[3, -math.inf]]]]
    words = demo.gateway.words
    json.dumps([chat_logprobs(words, [5], rows), completion_logprobs(words, [5], rows, [0])], allow_nan=False)
