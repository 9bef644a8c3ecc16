"""Selects the tool parser of a model, and defines what every parser returns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ....protocol.errors import encodable

if TYPE_CHECKING:
    from .hermes import HermesParser


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. ``arguments`` is JSON text, as in OpenAI's API."""

    name: str
    arguments: str


# Only what a call is to look like: other families' templates describe tools with the same names, for other calls.
_ASKS_FOR_LLAMA = re.compile(r'\{\s*"name":[^{},]{0,64},\s*"parameters":')
_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (  # in a template that has all of them
    (("<|channel|>commentary",), "harmony"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<minimax:tool_call>",), "minimax"),
    (("<parameter=",), "qwen3_coder"),
    (("<arg_key>",), "glm45"),
    (("<tool_calls>", "<tool_call>", "```json"), "hunyuan"),
    (("<tool_call>",), "hermes"),
    (("<tool_calls>",), "jamba"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("<|tool_call|>",), "granite"),
    (("functools[",), "granite"),
    (("<|tool|>", "'tools' in message"), "granite"),  # Phi-4-mini
    (("<|START_ACTION|>",), "cohere"),
    (("<TOOLCALL>",), "nemotron"),
    (("<|tools_prefix|>",), "apertus"),
    (("<start_function_call>",), "gemma"),
    (("<|action_start|>",), "internlm"),
    (("<｜tool▁calls▁begin｜>", "tools"), "deepseek"),  # most know calls of earlier turns, but not the tools
    (("<|python_tag|>",), "llama3_json"),
    (("single JSON array", '[{"name":'), "xlam"),
    (("[func_name1(",), "pythonic"),
    (("List of tools: ",), "lfm2"),  # of LFM2.5, some of whose templates have no marks
)
UNREADABLE = (ValueError, RecursionError)  # errors for a model's JSON: malformed, or nested too deeply
Found = list[str | Call]  # in the order of the text
Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of tools, by their names


class ToolParser(Protocol):
    """Parses an answer's text, piece by piece. What cannot be parsed as a call is returned as text."""

    def push(self, text: str) -> Found: ...

    def flush(self) -> Found:
        """The rest, once the answer has ended."""
        ...

    @property
    def is_holding(self) -> bool:
        """Whether it holds back text that may yet become a call or text."""
        ...


def find_parser(name: str, template: str) -> str:
    """The parser's name: as configured, or derived from the chat template; "none" if that has no known marks."""
    if name != "auto":
        return name
    for words, parser in _MARKS:
        if all(word in template for word in words):
            return parser
    return "llama3_json" if _ASKS_FOR_LLAMA.search(template) else "none"


def make_parser(name: str, tools: Schemas | None = None) -> ToolParser:
    """A parser for one answer; ``name`` is a result of ``find_parser``, ``tools`` are those of the request, if known.

    Any other name, as in a made-up request id, parses nothing.
    """
    from .forced import ArgumentsParser, ListParser
    from .harmony import HarmonyParser
    from .hermes import HermesParser
    from .llama import FormLlamaParser, LlamaParser
    from .marked import FORMATS, MarkedParser
    from .tagged import TAGGED

    parsers: dict[str, Callable[[], ToolParser]] = {
        "harmony": HarmonyParser,
        "hermes": HermesParser,
        "llama3_json": LlamaParser,
        "llama3": LlamaParser,  # in ids
        "llama3f": lambda: FormLlamaParser(tools),
        "required": ListParser,
    }
    kind, _, tool = name.partition(":")
    if name in TAGGED:
        return TAGGED[name](tools)
    if name in FORMATS:
        return MarkedParser(FORMATS[name])
    return ArgumentsParser(tool) if kind == "named" and tool else parsers.get(name, PlainText)()


def parser_within_thoughts(name: str) -> type[HermesParser] | None:
    """The parser of models that may call a tool without ending their reasoning first; None: other models' calls have
    other marks.
    """
    from .hermes import HermesParser
    from .tagged import TAGGED

    return HermesParser if name == "hermes" else TAGGED.get(name)


class PlainText:
    """A parser that finds no calls."""

    is_holding = False

    def push(self, text: str) -> Found:
        return visible(text)

    def flush(self) -> Found:
        return []


def visible(text: str) -> Found:
    """Text as a part of the answer; nothing if it is empty."""
    return [text] if text else []


def call_of(value: Any) -> Call | None:
    """A call from the object written by a model; None if it is malformed.

    Raises:
        ValueError: see ``arguments_text``.
    """
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name or encodable(name) != name:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return Call(name, arguments_text(arguments or {}))  # null, where there are none: clients expect an object


def arguments_text(arguments: Any) -> str:
    """The arguments from a model as JSON text; some models quote the object.

    A lone surrogate, which JSON can express but a reply cannot contain, stays escaped.

    Raises:
        ValueError: a number that is infinite or NaN, which Python reads and JSON has not.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return encodable(text)


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
