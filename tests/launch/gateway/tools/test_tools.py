"""How tool calls appear in a reply; their syntax is in ``test_tool_parsers.py``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.openai_types import check
from tests.launch.gateway.scripted import script
from tests.launch.gateway.sse import stream, text_of
from triptych import Driver

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "hi"}]
PIECES = ("I look. ", "<tool_", 'call>{"name": "weather", "arguments": {"city": "Rom"}}</tool', "_call>",
          '<tool_call>{"name": "time", "arguments": {}}</tool_call>')  # fmt: skip
CHAT = "/v1/chat/completions"


def test_calls_are_in_the_message(scripted: Site) -> None:
    client = script(scripted, *PIECES)
    reply = scripted.ask(CHAT, messages=MESSAGES, tools=TOOLS)
    [choice] = reply["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I look.")
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [{"name": "weather", "arguments": '{"city": "Rom"}'}, {"name": "time", "arguments": "{}"}]
    assert json.loads(client.asked[0]["tools"]) == TOOLS
    assert client.asked[0]["skip_special_tokens"] is False
    check("chat.ChatCompletion", reply)


def test_each_call_is_streamed_as_a_whole(scripted: Site) -> None:
    script(scripted, *PIECES)
    found = stream(scripted.http, CHAT, messages=MESSAGES, tools=TOOLS)
    deltas = [event.data["choices"][0]["delta"] for event in found[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look. "
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "weather"), (1, "time")]
    assert len({call["id"] for call in calls}) == 2
    assert found[-2].data["choices"][0]["finish_reason"] == "tool_calls"
    for event in found[:-1]:
        check("chat.ChatCompletionChunk", event.data)


CALL = '<tool_call>{"name": "time"}</tool_call>'


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (("\n", CALL, "\n", "\n", CALL, "\n"), ""),
        ((CALL, "\n", " so"), "\n so"),
        (("\n", "plain"), "\nplain"),
        (("\n", " "), "\n "),
    ],
    ids=["around calls", "text behind a call", "text", "nothing else"],
)
def test_white_space_around_streamed_calls_is_no_text(scripted: Site, pieces: tuple[str, ...], text: str) -> None:
    """Agents take the first text for the answer, and would not make the calls that follow it."""
    script(scripted, *pieces)
    found = stream(scripted.http, CHAT, messages=MESSAGES, tools=TOOLS)
    contents = [event.data["choices"][0]["delta"].get("content") for event in found[1:-1]]
    assert "".join(filter(None, contents)) == text
    assert not text or contents.count(text) == 1


def test_without_parallel_calls_only_the_first_is_returned(scripted: Site) -> None:
    script(scripted, *PIECES)
    reply = scripted.ask(CHAT, messages=MESSAGES, tools=TOOLS, parallel_tool_calls=False)
    assert len(reply["choices"][0]["message"]["tool_calls"]) == 1


def test_tool_choice_none_parses_no_calls(scripted: Site) -> None:
    client = script(scripted, *PIECES)
    reply = scripted.ask(CHAT, messages=MESSAGES, tools=TOOLS, tool_choice="none")
    assert reply["choices"][0]["message"]["content"] == "".join(PIECES)
    assert "tools" not in client.asked[0]


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": {}}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": {"type": "null"}}}, {"json_schema": {"type": "null"}}),
        ({"response_format": {"type": "json_object", "value": {"type": "null"}}}, {"json_schema": {"type": "null"}}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
         {"json_schema": {"type": "null"}}),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"json_schema": {"type": "null"}}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ],
)  # fmt: skip
def test_response_format_reaches_the_pipeline(scripted: Site, asked: dict[str, Any], form: dict[str, Any]) -> None:
    client = script(scripted, "x")
    scripted.ask(CHAT, messages=MESSAGES, **asked)
    scripted.ask("/v1/completions", prompt="hi", **asked)
    assert [request["structured"] for request in client.asked] == [form, form]


def test_schema_beside_json_object_reaches_the_pipeline_from_responses_too(scripted: Site) -> None:
    client = script(scripted, "x")
    scripted.ask("/v1/responses", input="hi", text={"format": {"type": "json_object", "schema": {"type": "null"}}})
    assert client.asked[0]["structured"] == {"json_schema": {"type": "null"}}


def test_calls_are_items_of_a_response(scripted: Site) -> None:
    wanted = {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]}
    script(scripted, *PIECES)
    reply = scripted.ask("/v1/responses", **wanted)
    assert [item["type"] for item in reply["output"]] == ["message", "function_call", "function_call"]
    check("responses.Response", reply)
    found = stream(scripted.http, "/v1/responses", **wanted)
    assert [event.data["sequence_number"] for event in found] == list(range(len(found)))
    assert [item["type"] for item in found[-1].data["response"]["output"]] == [item["type"] for item in reply["output"]]


def test_items_of_a_response_are_in_the_order_of_the_text(scripted: Site) -> None:
    wanted = {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]}
    script(scripted, *PIECES, "and more", finish_reason="length")
    whole = scripted.ask("/v1/responses", **wanted)
    streamed = stream(scripted.http, "/v1/responses", **wanted)[-1].data["response"]
    items = [
        [(item["type"], item["status"], item.get("content"), item.get("arguments")) for item in reply["output"]]
        for reply in (whole, streamed)
    ]
    assert items[0] == items[1]
    assert [kind for kind, *_ in items[0]] == ["message", "function_call", "function_call", "message"]
    assert [status for _, status, *_ in items[0]] == ["completed"] * 3 + ["incomplete"]


def test_response_items_that_are_sent_back_form_the_original_turn(scripted: Site) -> None:
    client = script(scripted, *PIECES)
    wanted = {"tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]}
    items = scripted.ask("/v1/responses", input="hi", **wanted)["output"]
    found = [{"type": "function_call_output", "call_id": item["call_id"], "output": "1"} for item in items[1:]]
    user, thought = MESSAGES[0], {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}]}
    scripted.ask("/v1/responses", input=[user, *items, *found, items[0], thought, items[1]], **wanted)
    turns = [(turn["role"], len(turn.get("tool_calls", ()))) for turn in client.asked[-1]["messages"]]
    tools = [("tool", 0), ("tool", 0)]
    assert turns == [("user", 0), ("assistant", 2), *tools, ("assistant", 0), ("assistant", 1)]


def test_function_of_a_namespace_is_called_by_both_names(scripted: Site) -> None:
    """Codex sends the tools of an MCP server so. A model knows only names."""
    said = '<tool_call>{"name": "mcp__sky__weather", "arguments": {}}</tool_call>'
    client = script(scripted, said, '<tool_call>{"name": "time", "arguments": {}}</tool_call>')
    weather, time = (
        {"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("weather", "time")
    )
    asked: dict[str, Any] = {"tools": [{"type": "namespace", "name": "mcp__sky", "tools": [weather]}, time]}
    reply = scripted.ask("/v1/responses", input="hi", **asked)
    check("responses.Response", reply)
    calls = [(item.get("namespace"), item["name"]) for item in reply["output"]]
    assert calls == [("mcp__sky", "weather"), (None, "time")]
    assert [t["function"]["name"] for t in json.loads(client.asked[0]["tools"])] == ["mcp__sky__weather", "time"]
    streamed = stream(scripted.http, "/v1/responses", input="hi", **asked)[-1].data["response"]["output"]
    assert [(item.get("namespace"), item["name"]) for item in streamed] == calls
    result = {"type": "function_call_output", "call_id": reply["output"][0]["call_id"], "output": "1"}
    scripted.ask("/v1/responses", input=[MESSAGES[0], reply["output"][0], result], **asked)
    [call] = client.asked[-1]["messages"][1]["tool_calls"]
    assert call["function"]["name"] == "mcp__sky__weather"


def test_conversation_that_another_service_began_goes_on_here(scripted: Site) -> None:
    """An agent that changes its provider sends what that has encrypted, which nobody else can read."""
    client = script(scripted, "So.")
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA=="}
    answer = {"role": "assistant", "content": "Yes."}
    scripted.ask("/v1/responses", input=[MESSAGES[0], thought, answer, MESSAGES[0]])
    assert client.asked[-1]["messages"] == [MESSAGES[0], answer, MESSAGES[0]]


def test_reasoning_without_an_answer_is_not_that_of_a_later_turn(scripted: Site) -> None:
    client = script(scripted, "So.")
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    answer = {"role": "assistant", "content": "Yes."}
    scripted.ask("/v1/responses", input=[MESSAGES[0], thought, MESSAGES[0], answer, MESSAGES[0]])
    assert client.asked[-1]["messages"] == [MESSAGES[0], MESSAGES[0], answer, MESSAGES[0]]


def test_streamed_response_that_fails_ends_with_the_typed_event(scripted: Site) -> None:
    script(scripted, "half an", finish_reason="abort")
    *_, last, error = stream(scripted.http, "/v1/responses", input="hi")
    assert (error.name, error.data["type"], error.data["code"]) == ("error", "error", "aborted")
    assert error.data["sequence_number"] == last.data["sequence_number"] + 1
    assert error.data["error"]["code"] == "aborted"  # for clients that recognise the event without its type


@pytest.mark.parametrize("pieces", [("I lo",), PIECES])
def test_truncated_message_is_incomplete(scripted: Site, pieces: tuple[str, ...]) -> None:
    script(scripted, *pieces, finish_reason="length")
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    whole = scripted.ask("/v1/responses", input="hi", tools=tools)
    streamed = stream(scripted.http, "/v1/responses", input="hi", tools=tools)[-1].data["response"]
    expected = "completed" if len(pieces) > 1 else "incomplete"
    assert [reply["output"][0]["status"] for reply in (whole, streamed)] == [expected] * 2


def test_answer_aborted_by_the_service_is_an_error(scripted: Site) -> None:
    script(scripted, "half an", finish_reason="abort")
    status, error = scripted.refusal(CHAT, messages=MESSAGES)
    assert (status, error["code"]) == (503, "aborted")


def test_model_without_tool_support_makes_only_calls_that_are_forced(demo: Site) -> None:
    status, error = demo.refusal(CHAT, messages=MESSAGES, tools=TOOLS)
    assert (status, error["param"]) == (400, "tools")
    assert "ask for calls by tool_choice, 'required'" in error["message"]
    found = demo.ask(CHAT, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=200)
    assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("parser", "pieces"),
    [
        ("hermes", ("I <tool", "_box> and <b", "> so <tool_c")),
        ("mistral", ("I [TOOL", "BOX] and [b", "] so [TOOL_C")),
        ("llama3_json", ("{", "I", " and")),
    ],
)
def test_stream_resumed_at_any_event_has_all_the_text_of_its_tokens(
    pipeline: Driver, parser: str, pieces: tuple[str, ...]
) -> None:
    with site(pipeline.run_dir, tool_parser=parser) as api:
        script(api, *pieces)
        found = stream(api.http, CHAT, messages=MESSAGES, tools=TOOLS, resumable=True)
    for number, event in enumerate(found[:-1], 1):
        assert text_of(found[:number]).startswith("".join(pieces[: int(event.id or 0)]))
    assert (text_of(found), found[-2].id) == ("".join(pieces), str(len(pieces)))


def test_text_of_the_same_tokens_is_one_event_of_a_resumable_stream(scripted: Site) -> None:
    script(scripted, 'so: <tool_call>{"name": "time"}', "</tool_call>")
    _, both, end, _ = stream(scripted.http, CHAT, messages=MESSAGES, tools=TOOLS, resumable=True)
    assert [both.id, *both.data["choices"][0]["delta"]] == ["2", "content", "tool_calls"]
    assert end.data["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("first", ["", "\n", "I look. "])
def test_white_space_between_calls_is_not_a_message_item(scripted: Site, first: str) -> None:
    script(scripted, first, PIECES[-1], "\n", PIECES[-1], "\n")
    wanted = {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]}
    reply = scripted.ask("/v1/responses", **wanted)
    found = stream(scripted.http, "/v1/responses", **wanted)
    output = found[-1].data["response"]["output"]
    assert [item["type"] for item in output] == [item["type"] for item in reply["output"]]


def test_each_item_of_a_streamed_response_has_its_own_id(scripted: Site) -> None:
    script(scripted, "I look. ", PIECES[-1], "\nAnd", " again.", PIECES[-1])
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    found = stream(scripted.http, "/v1/responses", input="hi", tools=tools)
    output = found[-1].data["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call"] * 2
    assert [item["content"][0]["text"] for item in output[::2]] == ["I look. ", "\nAnd again."]
    assert len({item["id"] for item in output}) == 4


@pytest.mark.parametrize("pieces", [("\n", " "), ("\n", "a"), ("",)])
def test_answer_of_white_space_is_still_a_message(scripted: Site, pieces: tuple[str, ...]) -> None:
    script(scripted, *pieces)
    found = stream(scripted.http, "/v1/responses", input="hi")
    [message] = found[-1].data["response"]["output"]
    assert message["content"][0]["text"] == "".join(pieces)


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("parser", ["qwen3_coder", "mistral", "llama3_json"])
def test_longest_id_leaves_room_for_the_parser_and_the_choices(pipeline: Driver, parser: str, resumable: bool) -> None:
    own_id = f"{parser}-{resumable}".ljust(40, "x")
    with site(pipeline.run_dir, tool_parser=parser) as api:
        wanted = {"messages": MESSAGES, "tools": TOOLS, "n": 2, "max_tokens": 1, "request_id": own_id}
        reply_id = api.ask(CHAT, **wanted, resumable=resumable)["id"]
        if resumable:
            reply = api.http.get(f"/v1/requests/{reply_id}", params={"stream": False})
            assert len(reply.json()["choices"]) == 2
            assert api.http.delete(f"/v1/requests/{reply_id}").status_code == 200
