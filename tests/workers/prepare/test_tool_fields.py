"""Chats with tools: fields of a request, and what the chat template receives."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triptych.protocol.codec import MAX_VALUES
from triptych.protocol.errors import InvalidRequest
from triptych.workers.prepare.chat_template import ChatTemplate
from triptych.workers.prepare.request import GenerationRequest
from triptych.workers.prepare.tool_fields import Message, chat_values

DEEP = {"function": {"name": "f", "arguments": "[" * 100_000}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "done", "tool_call_id": "c1", "name": "f"},
]


def read(wire: dict[str, Any]) -> tuple[list[Message], list[Any] | None]:
    request = GenerationRequest.from_wire(wire)
    return chat_values(request.messages or (), request.tools)


def test_template_gets_arguments_as_a_value() -> None:
    messages, tools = read({"messages": CHAT, "tools": '[{"type": "function"}]'})
    [call] = messages[1]["tool_calls"]
    assert (call["id"], call["type"], call["function"]["name"]) == ("c1", "function", "f")
    assert call["function"]["arguments"] == {"a": [1]}
    assert (messages[2]["tool_call_id"], messages[2]["name"]) == ("c1", "f")
    assert tools == [{"type": "function"}]


def test_template_gets_the_reasoning_before_an_answer() -> None:
    thoughts = "so " * 1000
    [message], _ = read({"messages": [{"role": "assistant", "content": "x", "reasoning_content": thoughts}]})
    for name in ("reasoning_content", "thinking"):  # the latter is gpt-oss's name
        assert ChatTemplate(f"{{{{ messages[0].{name} }}}}", {}).render([message]) == thoughts


def test_template_gets_tools_and_variables() -> None:
    template = ChatTemplate("{{ tools | length }} {{ thinking }} {{ messages[0].content }}", {})
    rendered = template.render([{"role": "user", "content": "x"}], tools=[1, 2], variables={"thinking": False})
    assert rendered == "2 False x"


@pytest.mark.parametrize(
    ("wire", "param", "reason"),
    [
        ({"tools": [1]}, "tools", "JSON text"),
        ({"tools": "{"}, "tools", "not JSON"),
        ({"tools": "[]"}, "tools", "1 to 1024"),
        ({"tools": json.dumps([1] * 1025)}, "tools", "1 to 1024"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(65)}}, "chat_template_kwargs", "64"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "map"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens", "limits are 1"),
        ({"max_prompt_tokens": True}, "max_prompt_tokens", "limits are 1"),
        ({"return_prompt": 1}, "return_prompt", "true or false"),
        ({"messages": [{"role": "a", "content": "", "tool_calls": {}}]}, "messages", "tool_calls must be a list"),
        ({"messages": [{"role": "a", "content": "", "tool_calls": [{}]}]}, "messages", "a function that has a name"),
        ({"messages": [{"role": "a", "content": "", "tool_calls": ["f"]}]}, "messages", "must be a map with"),
        ({"messages": [{"role": "a", "content": "", "name": 5}]}, "messages", "name must be a string"),
        ({"messages": [{"role": "a", "content": "", "reasoning_content": 5}]}, "messages", "reasoning_content must be"),
        ({"messages": [{"role": "a", "content": "", "tool_calls": [DEEP]}]}, "messages", "it is nested too deeply"),
    ],
)
def test_invalid_field_is_named(wire: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        read({"messages": CHAT, **wire})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ('{"city": "Ro', {"arguments": '{"city": "Ro'}),
        ("[1]", {"arguments": [1]}),
        ("null", {}),
        ('{"a": 1}', {"a": 1}),
    ],
)
def test_arguments_always_reach_the_template_as_an_object(written: str, seen: dict[str, Any]) -> None:
    """A model wrote them, and a client that sends them back with an error was refused: OpenAI's API takes any text."""
    call = {"function": {"name": "f", "arguments": written}}
    [message], _ = read({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]})
    assert message["tool_calls"][0]["function"]["arguments"] == seen


@pytest.mark.parametrize(
    "written",
    ["'<' + arguments + '>'", "'<' ~ arguments ~ '>'", "'<' + arguments|string + '>'", "'<' + arguments|tojson + '>'"],
)
def test_template_may_join_arguments_as_text(written: str) -> None:
    """As DeepSeek's and Apertus's do: it failed, or wrote a dictionary as Python does."""
    source = "{% set arguments = messages[1].tool_calls[0].function.arguments %}{{ " + written + " }}"
    messages, _ = read({"messages": CHAT})
    assert ChatTemplate(source, {}).render(messages) == '<{"a": [1]}>'


@pytest.mark.parametrize("own", ["", "{% if messages[1].tool_calls %}{% endif %}"], ids=["LFM2's", "another one"])
def test_calls_that_a_template_leaves_out_are_in_the_text(own: str) -> None:
    """As LFM2's does: the model did not see what it had called, and only the results."""
    source = "List of tools: <|tool_list_start|>{% for m in messages %}<{{ m.content }}>{% endfor %}" + own
    call = {"function": {"name": "f", "arguments": '{"a": "it\'s", "b": [true, null]}'}}
    messages, _ = read({"messages": [CHAT[0], {"role": "assistant", "content": "So.", "tool_calls": [call, CALL]}]})
    calls = "" if own else """<|tool_call_start|>[f(a="it's", b=[True, None]), f(a=[1])]<|tool_call_end|>"""
    assert ChatTemplate(source, {}).render(messages).endswith(f"<hi><{calls}So.>")


def test_tools_are_a_part_of_the_system_message_where_a_template_wants_them_there() -> None:
    """As Phi-4-mini's does, and no other: it was not told of any tools."""
    source = (
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
        "{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
        "<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}{% endfor %}"
    )
    messages, tools = read({"messages": CHAT, "tools": '[{"type": "function", "function": {"name": "f"}}]'})
    calls = '<|tool_call|>[{"name": "f", "arguments": {"a": [1]}}]<|/tool_call|>'
    chat = f"<|user|>hi<|assistant|>{calls}<|tool_response|>done"
    system = Message(role="system", content="S")
    assert ChatTemplate(source, {}).render(messages) == chat
    for before in ([], [system]):
        told = f'<|system|>{"S" if before else ""}<|tool|>[{{"name": "f"}}]<|/tool|>'
        assert ChatTemplate(source, {}).render([*before, *messages], tools=tools) == told + chat


def test_texts_of_a_refused_request_are_not_parsed() -> None:
    """For 8 MB this took a second, in which no other client was served, at no cost to the sender."""
    with pytest.raises(InvalidRequest, match="temperature"):
        GenerationRequest.from_wire({"messages": CHAT, "tools": "not JSON", "temperature": -5})


def test_values_of_all_texts_are_limited_together() -> None:
    half = f"[{'[],' * (MAX_VALUES // 4)}[]]"
    call = {"function": {"name": "f", "arguments": half}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call] * 2}]
    with pytest.raises(InvalidRequest, match=rf"tool_calls\[1\].* are more than {MAX_VALUES}"):
        read({"messages": chat})


@pytest.mark.parametrize("text", ["a,[{" * MAX_VALUES, '\\",' * MAX_VALUES], ids=["plain", "escaped"])
def test_brackets_inside_a_string_are_not_counted(text: str) -> None:
    _, tools = chat_values((), json.dumps([{"file": text}]))
    assert tools == [{"file": text}]
