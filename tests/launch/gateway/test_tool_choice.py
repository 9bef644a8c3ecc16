"""Which tools an answer may or must call, beside the form of its text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.scripted import script
from triptych import Driver

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("choice", "text", "names"),
    [
        (NAMED, '{"city": "Rom"}', ["weather"]),
        ("required", '[{"name": "weather", "arguments": {"city": "Rom"}}, {"name": "time", "arguments": {}}]',
         ["weather", "time"]),
    ],
    ids=["named", "required"],
)  # fmt: skip
def test_forced_call_becomes_a_schema(scripted: Site, choice: Any, text: str, names: list[str]) -> None:
    client = script(scripted, *text)
    reply = scripted.ask(CHAT, messages=MESSAGES, tools=TOOLS, tool_choice=choice)
    calls = [call["function"] for call in reply["choices"][0]["message"]["tool_calls"]]
    assert [call["name"] for call in calls] == names
    assert json.loads(calls[0]["arguments"]) == {"city": "Rom"}
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert client.asked[0]["structured"]["json_schema"]["type"] == ("object" if choice is NAMED else "array")


TIME_TOO: list[dict[str, Any]] = [
    *TOOLS,
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
]
FLAT = [{"type": "function", **tool["function"]} for tool in TIME_TOO]
TIME_ALONE = [{"type": "function", "function": {"name": "time"}}]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
@pytest.mark.parametrize(
    ("mode", "text", "offered", "forced"),
    [
        ("auto", '<tool_call>{"name": "time"}</tool_call>', ["time"], None),
        ("required", '[{"name": "time", "arguments": {}}]', ["weather", "time"], ["time"]),
    ],
)
def test_only_allowed_tools_can_be_called(
    scripted: Site, path: str, mode: str, text: str, offered: list[str], forced: list[str] | None
) -> None:
    """Those that a form excludes anyway stay in the prompt, so that it begins like that of the other turns."""
    client = script(scripted, text)
    choice: dict[str, Any]
    if path == CHAT:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": TIME_ALONE}}
        reply = scripted.ask(path, messages=MESSAGES, tools=TIME_TOO, tool_choice=choice)
        ChatCompletion.model_validate_json(json.dumps(reply), strict=True)
    else:
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "time"}]}
        reply = scripted.ask(path, input="hi", tools=FLAT, tool_choice=choice)
        Response.model_validate_json(json.dumps(reply), strict=True)
        assert reply["tool_choice"] == choice
    asked = client.asked[0]
    assert [tool["function"]["name"] for tool in json.loads(asked["tools"])] == offered
    calls = asked["structured"]["json_schema"]["items"]["anyOf"] if forced else None
    assert calls is None or [call["properties"]["name"]["const"] for call in calls] == forced


def test_hundreds_of_tools_are_offered(api: Site) -> None:
    """As agents do that are connected to several MCP servers."""
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(400)]
    assert api.ask("/tokenize", messages=MESSAGES, tools=tools)["count"]
    assert api.refusal("/tokenize", messages=MESSAGES, tools=tools * 3)[1]["param"] == "tools"


DIGIT = {"type": "integer", "minimum": 1, "maximum": 9}
PERSON = {"type": "object", "properties": {"name": DIGIT}, "required": ["name"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
FLAT_FORMAT = {"type": "json_schema", "schema": PERSON}
DAYS = {"type": "object", "properties": {"days": DIGIT}, "required": ["days"]}


def test_answer_with_a_form_may_call_tools_first(api: Site) -> None:
    """As agents need that end with structured output: the form left no room for calls. The hash model does either."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": DAYS}}]
    reply = api.ask(CHAT, messages=MESSAGES, tools=tools, response_format=FORMAT, seed=1, n=8, max_tokens=2000)
    messages = [choice["message"] for choice in reply["choices"]]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    texts = [message["content"] for message in messages if "tool_calls" not in message]
    assert {*json.loads(calls[0]["arguments"])} == {"days"}
    assert {*json.loads(texts[0])} == {"name"}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_form_leaves_room_for_calls_in_every_api(scripted: Site, path: str) -> None:
    client = script(scripted, CALL)
    wanted: dict[str, Any] = {"input": "hi", "tools": FLAT, "text": {"format": FLAT_FORMAT}}
    if path == "/v1/messages":
        tools = [{"name": "time", "input_schema": {"type": "object"}}]
        wanted = {"messages": MESSAGES, "max_tokens": 9, "tools": tools, "output_format": FLAT_FORMAT}
    reply = scripted.ask(path, **wanted)
    assert [part["type"] for part in reply.get("output") or reply["content"]] in (["function_call"], ["tool_use"])
    assert "<tool_call>" in client.asked[0]["structured"]["grammar"]


def test_answer_with_a_form_is_no_call_of_llama(pipeline: Driver) -> None:
    with site(pipeline.run_dir, tool_parser="llama3_json") as api:
        client = script(api, '{"name": "Bob"}')
        [choice] = api.ask(CHAT, messages=MESSAGES, tools=TOOLS, response_format=FORMAT)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"name": "Bob"}', "stop")
    assert client.asked[0]["structured"] == {"json_schema": PERSON}
    assert json.loads(client.asked[0]["tools"]) == TOOLS


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["any", "named"])
def test_forced_call_has_no_undeclared_arguments(api: Site, choice: Any) -> None:
    """The hash model generates anything that the grammar allows, so an undeclared name would soon appear."""
    parameters = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
                  "required": ["days"]}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for seed in range(5):
        reply = api.ask(
            "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], tools=tools, tool_choice=choice,
            parallel_tool_calls=False, seed=seed, max_tokens=2000,
        )  # fmt: skip
        [call] = reply["choices"][0]["message"]["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) == {"days"}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["any", "named"])
def test_id_of_a_forced_call_can_be_sent_back_to_mistral(pipeline: Driver, choice: Any) -> None:
    """Its template refuses ids that are not nine characters long."""
    with site(pipeline.run_dir, tool_parser="mistral") as api:
        script(api, '[{"name": "weather", "arguments": {}}]' if choice == "required" else "{}")
        [made] = api.ask(CHAT, messages=MESSAGES, tools=TOOLS, tool_choice=choice)["choices"]
    assert [len(call["id"]) for call in made["message"]["tool_calls"]] == [9]
