"""Structured answers and forced calls, through the whole pipeline."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai.types.chat import ChatCompletion

from tests.launch.gateway.conftest import Site
from tests.launch.gateway.sse import stream
from triptych.launch.gateway.forms.call_schemas import arguments_form, calls_form
from triptych.launch.gateway.schemas.chat import Tool

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What does len do?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


def test_answer_follows_its_schema(demo: Site) -> None:
    wanted: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    [choice] = demo.ask(CHAT, messages=MESSAGES, response_format=wanted, max_tokens=60)["choices"]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["message"]["content"])) == {"a", "b"}


@pytest.mark.parametrize("how", ["response_format", "structured_outputs", "beside calls"])
def test_answer_has_no_undeclared_property(api: Site, how: str) -> None:
    """The hash model generates anything that the grammar allows, so an undeclared name would soon appear."""
    schema = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}
    wanted: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }
    if how == "structured_outputs":
        wanted = {how: {"json": schema}}
    elif how == "beside calls":
        wanted |= {"tools": TOOLS}
    for seed in range(5):
        [choice] = api.ask(CHAT, messages=MESSAGES, **wanted, seed=seed, max_tokens=2000)["choices"]
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"a", "b"}
        else:
            assert choice["finish_reason"] == "tool_calls"


BAD = {"type": "objekt"}
BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("response_format", {"response_format": BAD_FORMAT}),
        ("structured_outputs", {"structured_outputs": {"json": BAD}}),
        ("tools", {"tools": [{**TOOLS[0], "function": {"name": "f", "parameters": BAD}}], "tool_choice": "required"}),
    ],
)
def test_form_that_does_not_compile_is_named_as_its_client_does(api: Site, field: str, body: dict[str, Any]) -> None:
    _, error = api.refusal(CHAT, messages=MESSAGES, **body)
    assert error["message"].startswith(f"{field} does not compile: ")


def test_answer_is_one_of_the_choices(demo: Site) -> None:
    wanted = {"choice": ["yes", "no"]}
    [choice] = demo.ask("/v1/completions", prompt="Sure?", structured_outputs=wanted)["choices"]
    assert choice["text"] in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["any", "named"])
def test_forced_call_has_the_arguments_of_its_tool(demo: Site, choice: Any) -> None:
    wanted = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200,
              "parallel_tool_calls": False}  # fmt: skip
    reply = demo.ask(CHAT, **wanted)
    [call] = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}
    ChatCompletion.model_validate_json(json.dumps(reply), strict=True)
    streamed = [c["delta"].get("tool_calls") for e in stream(demo.http, CHAT, **wanted)[:-1] for c in e.data["choices"]]
    assert [calls[0]["function"]["name"] for calls in streamed if calls] == ["f"]


NODE = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
IN_PARTS: dict[str, dict[str, Any]] = {
    "parts": {"type": "object", "properties": {"kids": {"$ref": "#/$defs/kids"}}, "$defs": {"kids": {"type": "array"}}},
    "a part of its own": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "itself": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}},
    "an id": {"$id": "http://a/", **NODE, "$defs": {"node": NODE}},
}


@pytest.mark.parametrize("parameters", IN_PARTS.values(), ids=IN_PARTS)
def test_forced_call_of_any_tool_follows_the_references_in_its_parameters(parameters: dict[str, Any]) -> None:
    """pydantic writes one for each class."""
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    form = Draft202012Validator(calls_form([tool, tool], single=True)["json_schema"])
    for kids, fits in (([], True), ([{}], True), (1, False)):
        assert form.is_valid([{"name": "f", "arguments": {"kids": kids}}]) == fits


@pytest.mark.parametrize(
    ("parameters", "takes_any"),
    [
        (None, False),
        ({"type": "object"}, False),
        ({"type": "object", "properties": {}}, False),
        ({"type": "object", "additionalProperties": True}, True),
    ],
)
def test_forced_call_of_a_tool_without_parameters_has_no_arguments(
    parameters: dict[str, Any] | None, takes_any: bool
) -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    form = Draft202012Validator(arguments_form(tool)["json_schema"])
    assert form.is_valid({})
    assert form.is_valid({"a": 1}) == takes_any
