"""Further fields of chats, besides roles and text: tools, tool calls and reasoning of the assistant, call results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ...protocol.codec import MAX_VALUES
from ...protocol.errors import InvalidRequest

MAX_TOOLS = 1024
MAX_CALLS = 128
MAX_NAME_CHARS = 256
MAX_TEMPLATE_KWARGS = 64
_TEXT_FIELDS = ("name", "tool_call_id")
CALL_FIELDS = frozenset({*_TEXT_FIELDS, "reasoning_content", "tool_calls"})
# Set by us for every template; a request must not override them.
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Also matches an unterminated string: otherwise each quote in it would be tried as the start of another one.
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)


class _Turn(TypedDict):
    role: str
    content: str


class Message(_Turn, total=False):
    """One turn of a chat. Text parts of the content are joined into one string, without a separator."""

    name: str
    tool_call_id: str
    reasoning_content: str  # the assistant's reasoning before its content
    tool_calls: list[dict[str, Any]]  # arguments may be JSON text, which ``chat_values`` parses


def add_calls(message: Message, name: str, value: Mapping[str, Any]) -> Message:
    """The message, extended by those of ``CALL_FIELDS`` that ``value`` has.

    Raises:
        InvalidRequest: one has the wrong type.
    """
    for key in _TEXT_FIELDS:
        text = value.get(key)
        if text is not None:
            if not isinstance(text, str) or len(text) > MAX_NAME_CHARS:
                raise _bad(f"{name}.{key} must be a string of at most {MAX_NAME_CHARS} characters, got {text!r:.80}")
            message[key] = text  # type: ignore[literal-required]
    thoughts = value.get("reasoning_content")
    if thoughts is not None:
        if not isinstance(thoughts, str):
            raise _bad(f"{name}.reasoning_content must be a string, got {thoughts!r:.80}")
        message["reasoning_content"] = thoughts
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
    return {"id": value.get("id", ""), "type": "function", "function": {**function, "arguments": arguments}}


def checked_tools(value: Any) -> str | None:
    """The tools as JSON text, which ``chat_values`` parses."""
    if value is not None and not isinstance(value, str):
        raise _bad_tools(value)
    return value


def chat_values(messages: Sequence[Message], tools: str | None) -> tuple[list[Message], list[Any] | None]:
    """The template's values, with JSON text parsed. For megabytes of text this may take long.

    Raises:
        InvalidRequest: a text is nested too deep, ``tools`` is not a JSON list, or all texts together have too many
            values.
    """
    texts = _JsonTexts()
    read = [_with_arguments(f"messages[{i}]", message, texts) for i, message in enumerate(messages)]
    return read, None if tools is None else _read_tools(tools, texts)


def _with_arguments(name: str, message: Message, texts: _JsonTexts) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for index, call in enumerate(message["tool_calls"]):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = texts.read(arguments or "{}")
            except json.JSONDecodeError:
                pass
            except ValueError as error:
                raise _bad(f"{name}.tool_calls[{index}].function.arguments is not JSON: {error}") from error
        if not isinstance(arguments, dict):
            # A model wrote them, and max_tokens may have cut them off. Clients tell it so, with its turn before that;
            # templates take any object, but not any text, list or null.
            arguments = {} if arguments is None else {"arguments": arguments}
        calls.append({**call, "function": {**call["function"], "arguments": _Arguments(arguments)}})
    return {**message, "tool_calls": calls}


class _Arguments(dict[str, Any]):
    """Arguments for any template: most go through an object, and some (Apertus, DeepSeek) join JSON text to others."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def _read_tools(text: str, texts: _JsonTexts) -> list[Any]:
    try:
        tools = texts.read(text)
    except ValueError as error:
        raise InvalidRequest(f"tools is not JSON: {error}", param="tools") from error
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise _bad_tools(text)
    return tools


class _JsonTexts:
    """Parses the JSON texts of one request, limited to as many values as a frame may have: three bytes can encode a
    map, which takes 64 bytes of memory, and parsing holds the GIL.
    """

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def read(self, text: str) -> Any:
        """
        Raises:
            ValueError: it is not JSON, is nested too deeply, or has too many values.
        """
        num_values = _count(text)
        if num_values > self._left:  # commas inside strings do not count: an argument may hold a whole file
            num_values = _count(_STRING.sub("", text))
        self._left -= num_values
        if self._left < 0:
            raise ValueError(f"the arrays, maps and entries of all texts are more than {MAX_VALUES}")
        try:
            return json.loads(text)
        except RecursionError as error:  # which from Python 3.14 on talks of the stack
            raise ValueError("it is nested too deeply") from error


def _count(text: str) -> int:
    """An upper bound for the number of arrays, maps and entries: also counts characters inside strings."""
    return text.count("[") + text.count("{") + text.count(",")


def checked_template_kwargs(value: Any) -> Mapping[str, Any]:
    """
    Raises:
        InvalidRequest: it is not a map, too large, or has a reserved name.
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


def _bad_tools(value: Any) -> InvalidRequest:
    return InvalidRequest(
        f"tools must be the JSON text of a list of 1 to {MAX_TOOLS} tools, got {value!r:.80}", param="tools"
    )


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
