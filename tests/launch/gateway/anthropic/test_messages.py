"""/v1/messages: chats in Anthropic's format, complete and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.scripted import FIRST_TURN, Dictation, ScriptedClient
from tests.launch.gateway.sse import Event, stream
from triptych import Driver
from triptych.launch.gateway.answer import AnswerReader
from triptych.launch.gateway.anthropic.blocks import blocks_of
from triptych.launch.gateway.errors import ApiError, json_response, message_error_map
from triptych.launch.gateway.forms.calls import ToolUse
from triptych.launch.gateway.reasoning.handling import Reasoning

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BASE: dict[str, Any] = {"max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "time", "description": "now", "input_schema": {"type": "object", "properties": {"zone": {}}}}
CALL = '<tool_call>{"name": "time", "arguments": {"zone": "UTC"}}</tool_call>'
SAID = f"<think>\nLet me see.\n</think>\n\nI look.\n{CALL}\n{CALL}"


def built(found: list[Event]) -> list[dict[str, Any]]:
    """The blocks built by these events; each is opened, filled and closed before the next one."""
    blocks: list[dict[str, Any]] = []
    for event in found:
        data = event.data
        assert data["index"] == len(blocks) - (event.name != "content_block_start")
        if event.name == "content_block_start":
            blocks.append(data["content_block"])
        elif event.name == "content_block_delta":
            [(name, text)] = ((name, text) for name, text in data["delta"].items() if name != "type")
            assert data["delta"]["type"] == {"partial_json": "input_json_delta"}.get(name, f"{name}_delta")
            blocks[-1] |= {"input": json.loads(text)} if name == "partial_json" else {name: blocks[-1][name] + text}
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


def test_answer_has_the_same_blocks_complete_and_streamed(thinking: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    Dictation(thinking, monkeypatch, SAID)
    reply = thinking.ask(PATH, **BASE, tools=[TOOL])
    call = {"type": "tool_use", "name": "time", "input": {"zone": "UTC"}}
    assert without_ids(reply["content"]) == [
        {"type": "thinking", "thinking": "Let me see.", "signature": "triptych"},
        {"type": "text", "text": "I look.\n"},
        *(call, call),
    ]
    assert (reply["type"], reply["role"], reply["stop_reason"]) == ("message", "assistant", "tool_use")
    found = stream(thinking.http, PATH, **BASE, tools=[TOOL])
    assert without_ids(built(found[1:-2])) == without_ids(reply["content"])
    assert [found[0].name, found[-2].name, found[-1].name] == ["message_start", "message_delta", "message_stop"]
    assert found[-2].data["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    for usage in (reply["usage"], found[-2].data["usage"]):
        assert usage["output_tokens_details"]["thinking_tokens"] == SAID.index("</think>") + len("</think>")
        num_input = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
        assert num_input == found[0].data["message"]["usage"]["input_tokens"]


@pytest.mark.parametrize("max_tokens", [200, 12], ids=["whole", "cut"])
def test_streamed_reasoning_is_signed_by_an_event_of_its_own(
    thinking: Site, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """Vercel's AI SDK knows signatures only from there, and forgets reasoning without one after the turn."""
    Dictation(thinking, monkeypatch, SAID)
    found = stream(thinking.http, PATH, **{**BASE, "max_tokens": max_tokens})
    [opened] = [event for event in found if event.name == "content_block_start" and event.data["index"] == 0]
    of_first = [event.data for event in found if event.data.get("index") == 0]
    assert opened.data["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [data["type"] for data in of_first[-2:]] == ["content_block_delta", "content_block_stop"]
    assert of_first[-2]["delta"] == {"type": "signature_delta", "signature": "triptych"}


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_accounting_of_a_client_is_no_instruction(thinking: Site, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Claude Code begins with a hash of the conversation: the tools behind it would be in no other's cache."""
    script = Dictation(thinking, monkeypatch, SAID)
    told = ("x-anthropic-billing-header: cc_version=2.1.197.135; cc_entrypoint=cli;", "Be ", "brief.")
    asked = {name: value for name, value in BASE.items() if path == PATH or name != "max_tokens"}
    thinking.ask(path, **asked, system=[{"type": "text", "text": text} for text in told])
    assert script.asked[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    thinking.ask(path, **asked, system=[{"type": "text", "text": told[0]}])
    assert script.asked[-1]["messages"] == BASE["messages"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ("end_turn", None)),
        ({"max_tokens": 20}, ("max_tokens", None)),
        ({"stop_sequences": ["x", "lo"]}, ("stop_sequence", "lo")),
    ],
)
def test_stop_reasons(
    thinking: Site, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    Dictation(thinking, monkeypatch, "<think>Let me see.</think>I look.")
    reply = thinking.ask(PATH, **{**BASE, **asked})
    assert (reply["stop_reason"], reply["stop_sequence"]) == expected


def test_conversation_becomes_a_chat(thinking: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Dictation(thinking, monkeypatch, SAID)
    reply = thinking.ask(PATH, **BASE, tools=[TOOL])
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "noon"}]}
        for block in reply["content"][2:]
    ]
    messages = [
        *BASE["messages"],
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, *reply["content"]]},
        {
            "role": "user",
            "content": [*results, {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}}],
        },
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    # The hash model's template does not support tool messages, so the request itself is checked.
    thinking.refusal(PATH, **{**BASE, "messages": messages}, system=system, top_k=5, temperature=0.5)
    asked = script.asked[-1]
    ids = [block["id"] for block in reply["content"][2:]]
    function = {"name": "time", "arguments": '{"zone": "UTC"}'}
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.\n", "reasoning_content": "Let me see.",
         "tool_calls": [{"type": "function", "id": call_id, "function": function} for call_id in ids]},
        *({"role": "tool", "content": "noon", "tool_call_id": call_id} for call_id in ids),
        {"role": "user", "content": "so?"},
    ]  # fmt: skip
    assert (asked["top_k"], asked["temperature"], asked["max_tokens"]) == (5, 0.5, 200)


@pytest.mark.parametrize(
    ("choice", "form"),
    [({"type": "auto"}, None), ({"type": "any"}, "array"), ({"type": "tool", "name": "time"}, "object")],
    ids=["auto", "any", "tool"],
)
def test_tool_choice_is_passed_on(
    thinking: Site, monkeypatch: pytest.MonkeyPatch, choice: dict[str, Any], form: str | None
) -> None:
    client = ScriptedClient('[{"name": "time", "arguments": {}}]' if form == "array" else "{}")
    monkeypatch.setitem(thinking.gateway.__dict__, "client", client)
    monkeypatch.setattr(thinking.gateway, "open_prompts", {FIRST_TURN: False})
    reply = thinking.ask(PATH, **BASE, tools=[TOOL], tool_choice=choice)
    assert [block["type"] for block in reply["content"]] == ["tool_use" if form else "text"]
    assert client.asked[0].get("structured", {}).get("json_schema", {}).get("type") == form
    thinking.ask(PATH, **BASE, tools=[TOOL], tool_choice={"type": "none"})
    assert "tools" not in client.asked[1]


@pytest.mark.parametrize("kind", ["enabled", "disabled"])
def test_thinking_switch_reaches_the_template(thinking: Site, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    script = Dictation(thinking, monkeypatch, "<think>So.</think>Yes.")
    reply = thinking.ask(PATH, **BASE, thinking={"type": kind, "budget_tokens": 1024})
    assert script.asked[-1]["chat_template_kwargs"] == dict.fromkeys(("enable_thinking", "thinking"), kind == "enabled")
    assert [block["type"] for block in reply["content"]] == ["thinking", "text"][kind == "disabled" :]


@pytest.mark.parametrize("pieces", [("",), ("\n", " "), ("\n", "a ", "b")])
def test_white_space_is_not_a_block(thinking: Site, monkeypatch: pytest.MonkeyPatch, pieces: tuple[str, ...]) -> None:
    monkeypatch.setitem(thinking.gateway.__dict__, "client", ScriptedClient(*pieces))
    monkeypatch.setattr(thinking.gateway, "open_prompts", {FIRST_TURN: False})
    text = "".join(pieces)
    expected = [{"type": "text", "text": text}] if text.strip() else []
    assert thinking.ask(PATH, **BASE)["content"] == built(stream(thinking.http, PATH, **BASE)[1:-2]) == expected


FORM = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}


@pytest.mark.parametrize("field", [{"output_config": {"format": FORM}}, {"output_format": FORM}], ids=["", "alias"])
def test_answer_follows_the_requested_schema(thinking: Site, field: dict[str, Any]) -> None:
    """Clients of Anthropic's first version of this feature send ``output_format``."""
    reply = thinking.ask(PATH, **BASE, **field)
    assert json.loads(reply["content"][0]["text"]) in ("yes", "no")


def test_counted_tokens_are_those_of_the_request(thinking: Site) -> None:
    count = thinking.ask(COUNT, messages=BASE["messages"], system="Be brief.")["input_tokens"]
    messages = [{"role": "system", "content": "Be brief."}, *BASE["messages"]]
    assert count == thinking.ask("/tokenize", messages=messages)["count"]


def test_counting_tokens_runs_no_step_and_has_no_length_limit(api: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Dictation(api, monkeypatch, "")
    most = api.gateway.card.max_model_len
    messages = [{"role": "user", "content": "x" * most}]
    assert api.ask(COUNT, messages=messages)["input_tokens"] == most + len("user: \nassistant: ")
    assert script.asked[0]["max_prompt_tokens"] == 1
    assert api.refusal(PATH, **{**BASE, "messages": messages})[0] == 400


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"nope": 1}, "nope"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    (block(type="image"), "messages[0].content[0].type"),
    (block(type="image", source={"type": "url"}), "messages[0].content[0].source"),
    (block(type="text"), "messages[0].content[0].text"),
    (block(type="tool_result"), "messages[0].content[0].tool_use_id"),
    (block(type="tool_use", id="a", name="f"), "messages[0].content[0]"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search", "allowed_domains": ["a"]}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format"),
    ({"output_format": {"type": "json_schema", "schema": {"type": 5}}}, "output_format"),
    ({"output_format": FORM, "output_config": {"format": FORM}}, "output_format"),
    ({"container": "a"}, "container"),
    ({"thread": {"type": "create"}}, "thread"),
]


@pytest.mark.parametrize(("wrong", "param"), WRONG, ids=[f"{param}-{i}" for i, (_, param) in enumerate(WRONG)])
def test_unsupported_field_is_a_400_that_names_it(api: Site, wrong: dict[str, Any], param: str) -> None:
    reply = api.post(PATH, **{**BASE, **wrong})
    body = reply.json()
    assert (reply.status_code, body["type"]) == (400, "error")
    assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", param)


def test_kept_conversation_is_refused_in_the_way_that_tool_runners_understand(api: Site) -> None:
    """Anthropic's tool runner asks for one, and sends the whole conversation after this error only."""
    _, error = api.refusal(PATH, **BASE, thread={"type": "create"})
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    _, error = api.refusal(PATH, **BASE, container="a")
    assert "details" not in error


def test_errors_have_anthropic_s_type_names(pipeline: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with site(pipeline.run_dir, api_key="secret") as api:
        reply = api.post(PATH, **BASE)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
        for headers in (
            {"x-api-key": "secret"},
            {"authorization": "Bearer secret"},
            {"authorization": "Bearer of another service", "x-api-key": "secret"},
        ):
            assert api.http.post(PATH, json=BASE, headers=headers).status_code == 200
        key = {"x-api-key": "secret"}
        reply = api.http.post(PATH, json={**BASE, "model": "other"}, headers=key)
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
        assert api.http.get(PATH, headers=key).json()["type"] == "error"
        monkeypatch.setitem(api.gateway.__dict__, "client", ScriptedClient("half an", finish_reason="abort"))
        events = api.http.post(PATH, json={**BASE, "stream": True}, headers=key).text.strip().split("\n\n")
        name, data = events[-1].splitlines()
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(("status", "kind"), [(400, "invalid_request_error"), (500, "api_error"), (502, "api_error")])
def test_type_of_an_error_says_whose_fault_it_is(status: int, kind: str) -> None:
    assert message_error_map(ApiError("no", status=status))["error"]["type"] == kind


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', r'{"a": "\ud83d"}', '{"a": 1'])
def test_arguments_that_no_reply_can_contain_are_text_in_the_input(arguments: str) -> None:
    """Half of a surrogate pair made the request fail, and numbers that are not JSON made the reply unreadable."""
    reader = AnswerReader(Reasoning(), ToolUse(parser="named:f"))
    [block] = blocks_of(reader.read(arguments), reader)
    sent = bytes(json_response(block).body)
    assert json.loads(sent, parse_constant=pytest.fail)["input"] == {"arguments": arguments}
