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
