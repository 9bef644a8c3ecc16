"""A checkpoint's chat template, rendered as transformers' ``apply_chat_template`` renders it, without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .tool_fields import Message

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
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self._source)


class _GenerationTag(Extension):
    """``{% generation %}`` marks what an assistant says, for training. Here it shows its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes < > & ' for HTML, which no model has seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
