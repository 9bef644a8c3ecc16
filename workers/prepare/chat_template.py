"""A checkpoint's chat template, rendered like transformers' ``apply_chat_template``, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .tool_fields import Message

if TYPE_CHECKING:
    import jinja2

_NONE: Mapping[str, Any] = {}
_LFM2_TOOLS = ("<|tool_list_start|>", "List of tools: ")  # in front of the tools
_END = "<|the model goes on here|> "  # with a space, as a template may strip trailing white space from a message


class ChatTemplate:
    """Turns the messages of a chat into the text the model was trained on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)  # "bos_token" -> "<s>": variables of the template

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] = _NONE,
        continue_final_message: bool = False,
    ) -> str:
        """The chat as text, ending where the model is to answer or to continue the last message; special tokens appear
        as text.

        ``variables`` are further variables of the checkpoint's template, such as ``enable_thinking``.

        Raises whatever the template raises: it comes with the checkpoint and may do anything.
        """
        turns = [self._turn(message) for message in messages]
        begun = turns[-1]["content"] if continue_final_message else ""
        if continue_final_message:
            turns[-1]["content"] += _END
        own = {
            "messages": turns,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": not continue_final_message,
        }
        text = self._compiled.render({**self._special_tokens, **variables, **own})
        return _up_to_the_end(text, begun) if continue_final_message else text

    def _turn(self, message: Message) -> dict[str, Any]:
        """The message as templates expect it: gpt-oss's uses another name for the reasoning."""
        thoughts = message.get("reasoning_content")
        turn: dict[str, Any] = {**message} if thoughts is None else {**message, "thinking": thoughts}
        if "tool_calls" in message and self._has_calls_in_text:
            calls = ", ".join(_written(call["function"]) for call in message["tool_calls"])
            turn["content"] = f"<|tool_call_start|>[{calls}]<|tool_call_end|>{message['content']}"
        return turn

    @cached_property
    def _has_calls_in_text(self) -> bool:
        """Whether the calls of earlier turns must be in their text, as in LFM2's template: it leaves out all others."""
        return "tool_calls" not in self._source and any(mark in self._source for mark in _LFM2_TOOLS)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        from .template_language import compile_template  # imported here: jinja2 makes a start a fifth longer

        return compile_template(self._source)


def _written(function: Mapping[str, Any]) -> str:
    """The call in Python's syntax, as LFM2 writes it."""
    values = {
        key: json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
        for key, value in function["arguments"].items()
    }
    return f"{function['name']}({', '.join(f'{key}={value}' for key, value in values.items())})"


def _up_to_the_end(text: str, begun: str) -> str:
    """The text up to the end of the last message, found in the same way as transformers does.

    Raises:
        ValueError: the template does not reproduce the message verbatim.
    """
    end = text.rfind(_END.rstrip())
    if end < 0 or begun.strip() not in text:
        raise ValueError("it leaves out a part of the message that is to be continued")
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()
