"""Which parser a model needs, and what every parser gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ....protocol.errors import encodable


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool. ``arguments`` is JSON text, as OpenAI has it."""

    name: str
    arguments: str


UNREADABLE = (ValueError, RecursionError)  # what JSON of a model may raise: it is none, or nested too deep
Found = list[str | Call]  # in the order of the text


class ToolParser(Protocol):
    """Takes an answer's text piece by piece. What cannot be read as a call is text after all."""

    def push(self, text: str) -> Found: ...

    def flush(self) -> Found:
        """What is left when the answer has ended."""
        ...

    @property
    def is_holding(self) -> bool:
        """Whether text was pushed that may yet become a call or text."""
        ...


def find_parser(name: str, template: str) -> str:
    """The parser's name: as configured, or by the words of the chat template; "none" if it has none of them."""
    if name != "auto":
        return name
    for word, parser in (
        ("<|channel|>commentary", "harmony"),
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ('"parameters"', "llama3_json"),
    ):
        if word in template:
            return parser
    return "none"


def make_parser(name: str) -> ToolParser:
    """A parser for one answer; ``name`` as ``find_parser`` gives it.

    A name that is none, out of the id of a request that somebody made up, is that of no parser.
    """
    from .forced import ArgumentsParser, ListParser
    from .harmony import HarmonyParser
    from .hermes import HermesParser
    from .llama import LlamaParser
    from .mistral import MistralParser

    parsers: dict[str, Callable[[], ToolParser]] = {
        "harmony": HarmonyParser,
        "hermes": HermesParser,
        "llama3_json": LlamaParser,
        "llama3": LlamaParser,  # in ids
        "mistral": MistralParser,
        "required": ListParser,
    }
    kind, _, tool = name.partition(":")
    return ArgumentsParser(tool) if kind == "named" and tool else parsers.get(name, PlainText)()


class PlainText:
    """No calls."""

    is_holding = False

    def push(self, text: str) -> Found:
        return [text] if text else []

    def flush(self) -> Found:
        return []


def call_of(value: Any) -> Call | None:
    """A call out of the object that a model wrote, or None if it is none."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or encodable(name) != name:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(name, arguments_text(arguments))


def arguments_text(arguments: Any) -> str:
    """JSON text of what a model gave a tool; some models quote the object.

    Half a surrogate pair, which JSON can say and no reply can hold, stays as it was written.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return encodable(text)


def held_back(text: str, marker: str) -> int:
    """Characters at the end of ``text`` that may be the beginning of ``marker``."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
