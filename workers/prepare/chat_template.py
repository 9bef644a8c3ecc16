"""A checkpoint's chat template, rendered as transformers' ``apply_chat_template`` renders it, without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .tool_fields import Message

if TYPE_CHECKING:
    import jinja2

_NONE: Mapping[str, Any] = {}
_END = "<|the model goes on here|> "  # with a space, for a template may cut white space off a message


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
        """The chat's text, ending where the model is to answer, or to go on with the last message; special tokens are
        in it as text.

        ``variables`` are what the checkpoint's template knows besides, such as ``enable_thinking``.

        Raises whatever the template raises: it comes with the checkpoint and may do anything.
        """
        turns = [_turn(message) for message in messages]
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

    @cached_property
    def _compiled(self) -> jinja2.Template:
        from .template_language import compile_template  # here, since a start takes a fifth longer with jinja2

        return compile_template(self._source)


def _turn(message: Message) -> dict[str, Any]:
    """As templates want it: that of gpt-oss has a word of its own for thoughts."""
    thoughts = message.get("reasoning_content")
    return {**message} if thoughts is None else {**message, "thinking": thoughts}


def _up_to_the_end(text: str, begun: str) -> str:
    """Of the last message, as transformers finds it.

    Raises:
        ValueError: the template does not show the message as it is.
    """
    end = text.rfind(_END.rstrip())
    if end < 0 or begun.strip() not in text:
        raise ValueError("it leaves out a part of the message that is to be continued")
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()
