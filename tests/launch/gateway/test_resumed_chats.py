"""A chat resumed at any event has the rest of what it would have had: reasoning, text and calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.scripted import Dictation
from tests.launch.gateway.sse import Event, events, stream
from triptych import Driver

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
TEXT = f"<think>\nLet me see.\n</think>\n\nI look. {CALL} and {CALL}\n<b>."


@pytest.fixture(scope="module", params=[1, 7, 1000])
def api(pipeline: Driver, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Gateways whose events have one token, a few, or all of them."""
    options = {"tool_parser": "hermes", "reasoning_parser": "think", "stream_interval": request.param}
    with site(pipeline.run_dir, **options) as served:
        yield served


def joined_deltas(found: list[Event], index: int = 0) -> dict[str, Any]:
    """The deltas of a choice put together, without the ids of calls."""
    whole: dict[str, Any] = {"reasoning": "", "content": "", "tool_calls": [], "finish_reason": None}
    for choice in [c for e in found if e.data != "[DONE]" for c in e.data["choices"] if c["index"] == index]:
        assert whole["finish_reason"] is None, "no event comes after the end"
        whole["finish_reason"] = choice["finish_reason"]
        for name in ("reasoning", "content"):
            whole[name] += choice["delta"].get(name) or ""
        whole["tool_calls"] += [(each["index"], each["function"]) for each in choice["delta"].get("tool_calls", ())]
    return whole


def together(first: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    return {name: rest[name] if name == "finish_reason" else first[name] + rest[name] for name in first}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (TEXT, {}),
        (TEXT, {"tools": TOOLS}),
        (TEXT, {"tools": TOOLS, "parallel_tool_calls": False}),
        (TEXT, {"separate_reasoning": False}),
        (f" {CALL}\n{CALL}\n so {CALL} ", {"tools": TOOLS}),
        ("I look. <tool_call>", {"max_tokens": 13, "tools": TOOLS}),
        ("I look. é", {"max_tokens": 9, "tools": TOOLS}),
        ("I look <b> a.", {"tools": TOOLS, "stop": ["<stop>", "."]}),
        ("<think>Let me.\nSee.</think>I look.", {"stop": ["\n\n\n"]}),
    ],
    ids=[
        "",
        "tools",
        "one call",
        "plain",
        "white space",
        "half a tag",
        "half a character",
        "half a stop",
        "stop in thoughts",
    ],
)
def test_stream_resumed_at_any_event_has_the_rest_once(
    api: Site, monkeypatch: pytest.MonkeyPatch, text: str, asked: dict[str, Any], n: int
) -> None:
    Dictation(api, monkeypatch, text)
    found = stream(api.http, CHAT, messages=MESSAGES, resumable=True, n=n, **asked)
    path = f"/v1/requests/{found[0].data['id']}"
    wanted = joined_deltas(stream(api.http, CHAT, messages=MESSAGES, **asked))
    try:
        for number in range(1, len(found), 1 + len(found) // 20):
            with api.http.stream("GET", path, headers={"last-event-id": found[number - 1].id or ""}) as reply:
                rest = list(events(reply))
            for index in range(n):
                assert together(joined_deltas(found[:number], index), joined_deltas(rest, index)) == wanted
    finally:
        assert api.http.delete(path).status_code == 200
