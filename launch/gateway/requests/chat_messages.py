"""Converts the messages and tools of a chat to the pipeline's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..errors import ApiError
from ..schemas.chat import ChatMessage, ContentPart, Tool
from ..schemas.messages import TextBlock


def wire_messages(messages: Sequence[ChatMessage], *, template: str) -> list[dict[str, Any]]:
    """Maps of role and content, and of tool calls if there are any.

    The role "developer" becomes "system" if the template does not know it.
    """
    return [_wire_message(message, knows_developer="developer" in template) for message in messages]


def _wire_message(message: ChatMessage, *, knows_developer: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not knows_developer else message.role
    wire: dict[str, Any] = {"role": role, "content": text_of(message.content)}
    if message.tool_calls:
        wire["tool_calls"] = [
            {"type": "function", "id": call.id or "", "function": call.function.model_dump()}
            for call in message.tool_calls
        ]
    if thoughts := message.reasoning_content or message.reasoning:
        wire["reasoning_content"] = thoughts
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            wire[name] = value
    return wire


def text_of(content: str | Sequence[ContentPart] | Sequence[TextBlock] | None) -> str:
    """The text parts, joined."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def wire_tools(tools: Sequence[Tool]) -> str:
    """As JSON text, since a schema may be nested deeper than a frame allows."""
    return json_text([tool.model_dump(exclude_none=True) for tool in tools], "tools")


def json_text(value: Any, param: str) -> str:
    """
    Raises:
        ApiError: it is nested too deeply for the JSON encoder.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise ApiError(f"{param} is nested too deep", param=param) from error
