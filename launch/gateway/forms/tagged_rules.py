"""Grammar rules for calls with a tag around each argument, see ``tools/tagged.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..requests.words import Words
from ..tools.tagged import GlmParser, MiniMaxParser, QwenCoderParser, TaggedParser
from ..tools.values import types_of
from .grammar_text import json_rule, literal

Signature = tuple[str, Mapping[str, Any]]  # name of a tool, and the schema of its arguments
_LINE = "\n"
_SHARED = ("$defs", "definitions")  # what the schema of an argument may refer to


def tagged_rules(words: Words, tools: Sequence[Signature], parser: type[TaggedParser], *, single: bool) -> list[str]:
    """The rules of ``calls`` in the format of ``parser``, with arguments in the order of the tools' schemas."""
    heads = " | ".join(f"call{index}" for index in range(len(tools)))
    return [
        f"calls: call{'' if single else ' (SPACE call)*'}",
        f"call: {words.in_grammar(parser.start)} SPACE ({heads}) SPACE {words.in_grammar(parser.end)}",
        *(rule for index, tool in enumerate(tools) for rule in _call(words, f"call{index}", tool, parser)),
    ]


def _call(words: Words, rule: str, tool: Signature, parser: type[TaggedParser]) -> Iterator[str]:
    if issubclass(parser, GlmParser):
        return _glm_call(words, rule, tool)
    if issubclass(parser, MiniMaxParser):
        return _nested_call(rule, tool, ('<invoke name="{}">', '<parameter name="{}">', "</invoke>"), "")
    padding = parser.padding if issubclass(parser, QwenCoderParser) else ""
    return _nested_call(rule, tool, ("<function={}>", "<parameter={}>", "</function>"), padding)


def _nested_call(rule: str, tool: Signature, tags: tuple[str, str, str], padding: str) -> Iterator[str]:
    """``tags``: that of the function, that of an argument, and the end tag of the function."""
    name, schema = tool
    arguments = argument_rules(rule, schema)
    head, end = literal(tags[0].format(name) + _LINE), literal(f"{padding}</parameter>{_LINE}")
    yield f"{rule}: {head} {_sequence(arguments, schema)} {literal(tags[2])}"
    for key, own in arguments.items():
        yield f"{own}: {literal(tags[1].format(key) + padding)} {own}v"
        yield from _value(f"{own}v", end, key, schema)


def _glm_call(words: Words, rule: str, tool: Signature) -> Iterator[str]:
    name, schema = tool
    arguments = argument_rules(rule, schema)
    yield f"{rule}: {literal(name)} {_sequence(arguments, schema)}"
    for key, own in arguments.items():
        marks = [words.in_grammar(mark) for mark in ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")]
        yield f"{own}: SPACE {marks[0]} {literal(key)} {marks[1]} SPACE {marks[2]} {own}v"
        yield from _value(f"{own}v", marks[3], key, schema)


def argument_rules(rule: str, schema: Mapping[str, Any]) -> dict[str, str]:
    """The rule of each argument."""
    properties = schema.get("properties")
    keys = properties if isinstance(properties, Mapping) else ()
    return {key: f"{rule}a{index}" for index, key in enumerate(keys)}


def value_schema(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The schema of the argument ``key`` alone."""
    argument = schema["properties"][key]
    shared = {name: schema[name] for name in _SHARED if name in schema}
    return {**shared, **argument} if isinstance(argument, Mapping) else {}


def _sequence(arguments: Mapping[str, str], schema: Mapping[str, Any]) -> str:
    required = schema.get("required")
    needed = required if isinstance(required, list) else ()
    return " ".join(f"{own}{'' if key in needed else '?'}" for key, own in arguments.items())


def _value(rule: str, end: str, key: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """A value and the mark behind it: any text if it may be text, and JSON otherwise."""
    argument = schema["properties"][key]
    types = types_of(argument, schema)
    choices = argument.get("enum") if isinstance(argument, dict) else None
    if types == {"string"} and isinstance(choices, list):
        yield f"{rule}: ({' | '.join(map(literal, choices))}) {end}"
    elif types and "string" not in types:
        yield f"{rule}: {json_rule(value_schema(schema, key), 'tools')} {end}"
    elif end.startswith("<["):  # a token, which text does not contain
        yield f"{rule}: /(?s:.*)/ {end}"
    else:
        yield f"{rule}[suffix={end}]: /(?s:.*)/"
