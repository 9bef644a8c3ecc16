"""A checkpoint's chat template, rendered as transformers' ``apply_chat_template`` renders it, without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .tool_fields import Message

if TYPE_CHECKING:
    import jinja2

_NONE: Mapping[str, Any] = {}


class ChatTemplate:
    """Turns the messages of a chat into the text the model was trained on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)  # "bos_token" -> "<s>": variables of the template

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, variables: Mapping[str, Any] = _NONE
    ) -> str:
        """The chat's text, ending where the model is to answer; special tokens are in it as text.

        ``variables`` are what the checkpoint's template knows besides, such as ``enable_thinking``.

        Raises whatever the template raises: it comes with the checkpoint and may do anything.
        """
        own = {
            "messages": [dict(m) for m in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": True,
        }
        return self._compiled.render({**self._special_tokens, **variables, **own})

    @cached_property
    def _compiled(self) -> jinja2.Template:
        from .template_language import compile_template  # here, since a start takes a fifth longer with jinja2

        return compile_template(self._source)
