"""Chats with tools: what a request may bring, and what the chat template gets of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triptych.protocol.errors import InvalidRequest
from triptych.workers.prepare.chat_template import ChatTemplate
from triptych.workers.prepare.request import GenerationRequest

DEEP = {"function": {"name": "f", "arguments": "[" * 100_000}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "done", "tool_call_id": "c1", "name": "f"},
]


def test_the_template_gets_arguments_as_a_value() -> None:
    request = GenerationRequest.from_wire({"messages": CHAT, "tools": '[{"type": "function"}]'})
    assert request.messages is not None
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    assert (request.messages[2]["tool_call_id"], request.messages[2]["name"]) == ("c1", "f")
    assert request.tools == [{"type": "function"}]


def test_tools_and_variables_are_known_to_the_template() -> None:
    template = ChatTemplate("{{ tools | length }} {{ thinking }} {{ messages[0].content }}", {})
    rendered = template.render([{"role": "user", "content": "x"}], tools=[1, 2], variables={"thinking": False})
    assert rendered == "2 False x"


@pytest.mark.parametrize(
    ("wire", "param", "reason"),
    [
        ({"tools": [1]}, "tools", "JSON text"),
        ({"tools": "{"}, "tools", "no JSON"),
        ({"tools": "[]"}, "tools", "1 to 128"),
        ({"tools": json.dumps([1] * 129)}, "tools", "1 to 128"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(65)}}, "chat_template_kwargs", "64"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "map"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens", "limits are 1"),
        ({"max_prompt_tokens": True}, "max_prompt_tokens", "limits are 1"),
        ({"return_prompt": 1}, "return_prompt", "true or false"),
        ({"messages": [{"role": "a", "content": "", "tool_calls": {}}]}, "messages", "tool_calls must be a list"),
        ({"messages": [{"role": "a", "content": "", "tool_calls": [{}]}]}, "messages", "a function that has a name"),
        ({"messages": [{"role": "a", "content": "", "name": 5}]}, "messages", "name must be a string"),
        (
            {"messages": [{"role": "a", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
            "no JSON",
        ),
        ({"messages": [{"role": "a", "content": "", "tool_calls": [DEEP]}]}, "messages", "no JSON: maximum recursion"),
    ],
)
def test_what_is_wrong_is_named(wire: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        GenerationRequest.from_wire({"messages": CHAT, **wire})
    assert caught.value.param == param
