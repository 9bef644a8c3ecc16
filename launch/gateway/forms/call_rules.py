"""Grammar rules for calls as each family of models writes them; those with a tag around each argument are in
``tagged_rules.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..requests.words import Words
from ..schemas.chat import Tool
from ..tools.llama import TAG
from ..tools.marked import ARGS, CALL_ID, MARKER, SEPARATOR
from .call_schemas import arguments_schema, call_schema
from .grammar_text import json_rule, literal
from .tagged_rules import Signature, argument_rules, value_schema

Pieces = tuple[str, ...]
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_OPTIONAL = {CALL_ID: "/[a-zA-Z0-9]{9}/", TAG: ""}  # marks, and what follows them


class Layout(NamedTuple):
    """What is written around calls."""

    open: Pieces = ()
    before: Pieces = ()  # each call
    keys: Pieces | None = ("name", "arguments")  # as for ``call_schema``; None: the name is not part of the JSON
    middle: Pieces = ()  # between such a name and the arguments; none: they are in Python's syntax
    after: Pieces = ()
    separator: Pieces = ()
    close: Pieces = ()


def _in_list(start: str, *ends: str, keys: Pieces | None = ("name", "arguments")) -> Layout:
    return Layout(open=(start, "["), keys=keys, separator=(",",), close=("]", *ends))


# Of a format with several variants, the first is used whose word is in the template.
_LAYOUTS: dict[str, tuple[tuple[str, Layout], ...]] = {
    "apertus": (("", _in_list("<|tools_prefix|>", "<|tools_suffix|>", keys=())),),
    "cohere": (
        ("", Layout(
            ("<|START_ACTION|>", "[\n    "), keys=("tool_call_id", "tool_name", "parameters"), separator=(",\n    ",),
            close=("\n]", "<|END_ACTION|>"),
        )),
    ),
    "deepseek": (
        ("```json", Layout(
            ("<｜tool▁calls▁begin｜>",), (_CALL, "function", SEPARATOR), None, ("\n```json\n",), ("\n```", _CALL_END),
            close=("<｜tool▁calls▁end｜>",),
        )),
        ("", Layout(
            ("<｜tool▁calls▁begin｜>",), (_CALL,), None, (SEPARATOR,), (_CALL_END,), close=("<｜tool▁calls▁end｜>",)
        )),
    ),
    "granite": (
        ("functools[", Layout(open=("functools[",), separator=(",",), close=("]",))),
        ("<|tool|>", _in_list("<|tool_call|>", "<|/tool_call|>")),  # Phi-4-mini
        ("", _in_list("<|tool_call|>")),
    ),
    "hermes": (("", Layout(before=("<tool_call>",), after=("</tool_call>",))),),
    "hunyuan": (
        ("", Layout(
            ("<tool_calls>",), ("<tool_call>",), None, ("\n```json\n",), ("\n```\n", "</tool_call>"),
            close=("</tool_calls>",),
        )),
    ),
    "internlm": (
        ("", Layout(before=("<|action_start|>", "<|plugin|>"), keys=("name", "parameters"), after=("<|action_end|>",))),
    ),
    "jamba": (("", _in_list("<tool_calls>", "</tool_calls>")),),
    "lfm2": (
        ("```python", Layout(
            ("<|tool_call_start|>", "```python\n"), keys=None, separator=("\n",), close=("```", "<|tool_call_end|>")
        )),
        ("", _in_list("<|tool_call_start|>", "<|tool_call_end|>", keys=None)),
    ),
    "llama3_json": (("", Layout((TAG,), keys=("name", "parameters"), separator=(";",))),),
    "mistral": (
        (ARGS, Layout(before=(MARKER,), keys=None, middle=(CALL_ID, ARGS))),
        ("", _in_list(MARKER)),
    ),
    "nemotron": (("", _in_list("<TOOLCALL>", "</TOOLCALL>")),),
    "olmo3": (("", Layout(("<function_calls>",), keys=None, separator=("\n",), close=("</function_calls>",))),),
    "pythonic": (("", Layout(("[",), keys=None, separator=(",",), close=("]",))),),
}  # fmt: skip


def call_rules(words: Words, tools: Sequence[Tool], name: str, template: str, *, single: bool) -> list[str] | None:
    """The rules of ``calls`` in the format ``name``, as models with this template write them; None if JSON could be
    taken for such calls.

    Raises:
        ApiError: the arguments of a tool are nested too deeply.
    """
    layout = next((layout for word, layout in _LAYOUTS.get(name, ()) if word in template), None)
    if layout is None:
        return None
    gap = " SPACE " if layout.keys is not None else " "
    more = "" if single else f" ({_pieces(words, ('', *layout.separator, ''))} call)*"
    call = gap.join(filter(None, (*_each(words, layout.before), "body", *_each(words, layout.after))))
    return [
        f"calls: {_pieces(words, (*layout.open, ''))} call{more} {_pieces(words, ('', *layout.close))}",
        f"call: {call}",
        *_bodies(words, tools, layout),
    ]


def _pieces(words: Words, pieces: Pieces) -> str:
    """In a grammar, with white space allowed between the pieces."""
    return " SPACE ".join(_each(words, pieces)) if len(pieces) > 1 else ""


def _each(words: Words, pieces: Pieces) -> list[str]:
    return [_piece(words, piece) for piece in pieces]


def _piece(words: Words, piece: str) -> str:
    if piece in _OPTIONAL:
        return f"({words.in_grammar(piece)} {_OPTIONAL[piece]})?"
    is_mark = len(piece) > 1 and piece.startswith(("<", "["))
    return words.in_grammar(piece) if is_mark else literal(piece) if piece else ""


def _bodies(words: Words, tools: Sequence[Tool], layout: Layout) -> Iterator[str]:
    if layout.keys is not None:
        yield f"body: {json_rule(call_schema(tools, keys=layout.keys), 'tools')}"
        return
    yield f"body: {' | '.join(f'call{index}' for index in range(len(tools)))}"
    for index, tool in enumerate(tools):
        name, arguments = tool.function.name, arguments_schema(tool)
        if layout.middle:
            middle = " ".join(_each(words, layout.middle))
            yield f"call{index}: {literal(name)} {middle} arguments{index}"
            yield f"arguments{index}: {json_rule(arguments, 'tools')}"
        else:
            yield from _pythonic(f"call{index}", (name, arguments))


def _pythonic(rule: str, tool: Signature) -> Iterator[str]:
    """A call in Python's syntax; the values are JSON."""
    name, schema = tool
    required = schema.get("required")
    needed = required if isinstance(required, list) else ()
    arguments = argument_rules(rule, schema)
    first = more = ""  # the rest, without and with arguments before it
    for key, own in reversed(arguments.items()):
        yield f"{own}: {literal(f'{key}=')} {json_rule(value_schema(schema, key), 'tools')}"
        optional = "" if key in needed else "?"
        yield f"{own}f: {own} {more}" + (f" | {first or 'SPACE'}" if optional else "")
        yield f'{own}m: ("," SPACE {own}){optional} {more}'
        first, more = f"{own}f", f"{own}m"
    yield f'{rule}: {literal(f"{name}(")} {first} ")"'
