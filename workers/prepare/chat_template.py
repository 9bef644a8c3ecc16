"""A checkpoint's chat template, rendered like transformers' ``apply_chat_template``, without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...protocol.errors import ConfigError
from .instructions import gathered, later_instructions
from .tool_fields import Message
from .tool_turns import Turn, tool_turns

if TYPE_CHECKING:
    import jinja2

_NONE: Mapping[str, Any] = {}
_END = "<|the model goes on here|> "  # with a space, as a template may strip trailing white space from a message


class ChatTemplate:
    """Turns the messages of a chat into the text the model was trained on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)  # "bos_token" -> "<s>": variables of the template

    def check(self) -> None:
        """
        Raises:
            ConfigError: it is not valid Jinja.
        """
        from jinja2 import TemplateSyntaxError

        try:
            _ = self._compiled
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"chat_template is not valid: line {error.lineno}: {error.message}", param="chat_template"
            ) from error

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

        ``variables`` are further variables of the checkpoint's template, such as ``enable_thinking``. System messages
        that the template refuses or leaves out, because they are not the first message, are ``gathered``.

        Raises whatever the template raises: it comes with the checkpoint and may do anything.
        """
        turns = [_turn(message) for message in messages]

        def rendered(turns: list[Turn]) -> str:
            return self._rendered(turns, tools, variables, continue_final_message=continue_final_message)

        if not (later := later_instructions(turns)):
            return rendered(turns)
        try:
            text = rendered(turns)
        except Exception:  # which may have another reason: then the other form has it too
            return rendered(gathered(turns))
        if not all(told.strip() in text for told in later):
            with suppress(Exception):  # a template that wants neither form has told its own
                return rendered(gathered(turns))
        return text

    def _rendered(
        self,
        turns: list[Turn],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        *,
        continue_final_message: bool,
    ) -> str:
        turns = tool_turns(self._source, turns, tools)
        begun = turns[-1]["content"] if continue_final_message else ""
        if continue_final_message:
            turns[-1] = {**turns[-1], "content": begun + _END}
        own = {
            "messages": turns,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": not continue_final_message,
        }
        text = self._compiled.render({**self._special_tokens, **variables, **own})
        return _up_to_the_end(text, begun) if continue_final_message else text

    @cached_property
    def _compiled(self) -> jinja2.Template:
        from .template_language import compile_template  # imported here: jinja2 makes a start a fifth longer

        return compile_template(self._source)


def _turn(message: Message) -> dict[str, Any]:
    """The message as templates expect it: gpt-oss's uses another name for the reasoning."""
    thoughts = message.get("reasoning_content")
    return {**message} if thoughts is None else {**message, "thinking": thoughts}


def _up_to_the_end(text: str, begun: str) -> str:
    """The text up to the end of the last message, found in the same way as transformers does.

    Raises:
        ValueError: the template does not reproduce the message verbatim.
    """
    end = text.rfind(_END.rstrip())
    if end < 0 or begun.strip() not in text:
        raise ValueError("it leaves out a part of the message that is to be continued")
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()
