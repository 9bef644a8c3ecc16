"""What a chat with tools has besides roles and text: the tools, the calls of the assistant, and what came of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict

from ...protocol.errors import InvalidRequest

MAX_TOOLS = 128
MAX_CALLS = 128
MAX_NAME_CHARS = 256
MAX_TEMPLATE_KWARGS = 64
_TEXT_FIELDS = ("name", "tool_call_id")
CALL_FIELDS = frozenset({*_TEXT_FIELDS, "tool_calls"})
# What the template gets from us; a request must not put something else in their place.
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class _Turn(TypedDict):
    role: str
    content: str


class Message(_Turn, total=False):
    """One turn of a chat. Text parts of the wire's content are joined to one string, without a separator."""

    name: str
    tool_call_id: str
    tool_calls: list[dict[str, Any]]  # arguments are JSON text on the wire and the value of it here


def add_calls(message: Message, name: str, value: Mapping[str, Any]) -> Message:
    """The message with the fields of ``CALL_FIELDS`` that it has on the wire.

    Raises:
        InvalidRequest: one has the wrong type, or the arguments of a call are no JSON.
    """
    for key in _TEXT_FIELDS:
        text = value.get(key)
        if text is not None:
            if not isinstance(text, str) or len(text) > MAX_NAME_CHARS:
                raise _bad(f"{name}.{key} must be a string of at most {MAX_NAME_CHARS} characters, got {text!r:.80}")
            message[key] = text  # type: ignore[literal-required]
    calls = value.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or len(calls) > MAX_CALLS:
            raise _bad(f"{name}.tool_calls must be a list of at most {MAX_CALLS} maps, got {calls!r:.80}")
        message["tool_calls"] = [_checked_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return message


def _checked_call(name: str, value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad(f"{name} must be a map with a function that has a name, got {value!r:.80}")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):  # templates write the value, not the text of it
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise _bad(f"{name}.function.arguments is no JSON: {error}") from error
    return {"id": value.get("id", ""), "type": "function", "function": {**function, "arguments": arguments}}


def checked_tools(value: Any) -> list[Any] | None:
    """The tools out of their JSON text; None if there are none.

    Raises:
        InvalidRequest: it is no JSON text of a list.
    """
    if value is None:
        return None
    try:
        tools = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"tools is no JSON: {error}", param="tools") from error
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidRequest(
            f"tools must be the JSON text of a list of 1 to {MAX_TOOLS} tools, got {value!r:.80}", param="tools"
        )
    return tools


def checked_template_kwargs(value: Any) -> Mapping[str, Any]:
    """
    Raises:
        InvalidRequest: no map, too large, or a name that the template has from us.
    """
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_KWARGS or not all(type(key) is str for key in value):
        raise InvalidRequest(
            f"chat_template_kwargs must be a map of at most {MAX_TEMPLATE_KWARGS} names, got {value!r:.80}",
            param="chat_template_kwargs",
        )
    if taken := _OWN_VARIABLES & value.keys():
        raise InvalidRequest(f"chat_template_kwargs must not hold {min(taken)}", param="chat_template_kwargs")
    return value


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
