"""Answers in a required form: the pipeline's options for ``response_format``, ``structured_outputs`` and forced tool
calls. Whether a form can be enforced is decided by the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ApiError, unsupported
from .grammar_text import json_rule, literal
from .schemas.chat import Tool
from .schemas.structure import ResponseFormat, StructuredOutputs
from .state import Gateway
from .tagged_rules import tagged_rules
from .tools.hermes import HermesParser
from .tools.llama import TAG
from .tools.mistral import ARGS, CALL_ID, MARKER
from .tools.tagged import TAGGED
from .words import Words

# Keywords that allow names beyond those in "properties", or refer to them.
_EXTENDING = frozenset((
    "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "allOf", "anyOf", "oneOf",
    "not", "if", "$ref", "dependentSchemas",
))  # fmt: skip


def structured_options(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> dict[str, Any]:
    """The options of a request whose answer must have a form; none for plain text.

    Raises:
        ApiError: no form is given, or two are.
    """
    if outputs is not None:
        if response_format is not None and response_format.type != "text":
            raise unsupported("structured_outputs", "response_format and structured_outputs exclude each other")
        return {"structured": outputs.form()}
    if response_format is None or response_format.type == "text":
        return {}
    if response_format.type == "json_object":
        return {"structured": {"json_object": True}}
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        param = "response_format.json_schema"
        raise ApiError(f"{param}.schema is required", code="missing_required_parameter", param=param)
    return {"structured": {"json_schema": response_format.json_schema.schema_}}


def arguments_form(tool: Tool) -> dict[str, Any]:
    """The form of an answer that consists of the arguments of this tool."""
    return {"json_schema": _arguments(tool)}


def _arguments(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, allowing only declared ones unless it says otherwise.

    By default a schema allows any additional name, which no function accepts: schemas that pydantic and others derive
    from a function's signature do not exclude them. A function that declares none takes none. Nested schemas are left
    as they are.
    """
    schema = tool.function.parameters or {"type": "object"}
    return schema if _EXTENDING.intersection(schema) else {**schema, "additionalProperties": False}


def calls_form(tools: Sequence[Tool], *, single: bool) -> dict[str, Any]:
    """The form of an answer that is a list of at least one call.

    Raises:
        ApiError: the arguments of a tool are nested too deeply.
    """
    limits = {"minItems": 1, **({"maxItems": 1} if single else {})}
    return {"json_schema": {"type": "array", "items": _any_call(tools, "/items"), **limits}}


def call_alternative(
    gateway: Gateway, text: Mapping[str, Any], tools: Sequence[Tool], *, single: bool
) -> dict[str, Any] | None:
    """The form of an answer that is either JSON of the form ``text`` or calls as this model writes them; None if
    ``text`` is not JSON.

    Raises:
        ApiError: the arguments of a tool, or the form, are nested too deeply.
    """
    if not text.keys() <= {"json_schema", "json_object"}:
        return None
    schema = text.get("json_schema", {"type": "object"})
    match gateway.tool_parser:
        case "hermes":
            calls = _hermes_rules(gateway.words, tools, single=single)
        case "mistral" if ARGS in (gateway.facts.chat_template or ""):
            calls = _named_rules(gateway.words, tools, single=single)
        case "mistral":
            calls = [
                f"calls: {gateway.words.in_grammar(MARKER)} SPACE list",
                f"list: {json_rule(calls_form(tools, single=single)['json_schema'], 'tools')}",
            ]
        case "llama3_json":
            more = "" if single else ' (SPACE ";" SPACE call)*'
            calls = [
                f"calls: ({gateway.words.in_grammar(TAG)} SPACE)? call{more}",
                f"call: {json_rule(_any_call(tools, '', 'parameters'), 'tools')}",
            ]
        case "qwen3_coder" | "seed_oss" | "glm45" as name:
            signatures = [(tool.function.name, _arguments(tool)) for tool in tools]
            calls = tagged_rules(gateway.words, signatures, TAGGED[name], single=single)
        case _:
            return None
    rules = ["start: text | calls", f"text: {json_rule(schema, 'structured')}", *calls, r"SPACE: /[ \n]{0,2}/"]
    return {"grammar": "\n".join(rules)}


def _hermes_rules(words: Words, tools: Sequence[Tool], *, single: bool) -> list[str]:
    start, end = words.in_grammar(HermesParser.start), words.in_grammar(HermesParser.end)
    return [
        f"calls: call{'' if single else ' (SPACE call)*'}",
        f"call: {start} SPACE function SPACE {end}",
        f"function: {json_rule(_any_call(tools, ''), 'tools')}",
    ]


def _named_rules(words: Words, tools: Sequence[Tool], *, single: bool) -> list[str]:
    """For Mistral's later format, in which the name is not part of the JSON."""
    heads = [f"{literal(tool.function.name)} middle arguments{index}" for index, tool in enumerate(tools)]
    return [
        f"calls: call{'' if single else '+'}",
        f"call: {words.in_grammar(MARKER)} ({' | '.join(heads)})",
        f"middle: ({words.in_grammar(CALL_ID)} /[a-zA-Z0-9]{{9}}/)? {words.in_grammar(ARGS)}",
        *(f"arguments{index}: {json_rule(_arguments(tool), 'tools')}" for index, tool in enumerate(tools)),
    ]


def _any_call(tools: Sequence[Tool], place: str, key: str = "arguments") -> dict[str, Any]:
    """The schema of one call, as a part of another one at ``place``."""
    try:
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    key: _moved(_arguments(tool), f"{place}/anyOf/{index}/properties/{key}"),
                },
                "required": ["name", key],
                "additionalProperties": False,
            }
            for index, tool in enumerate(tools)
        ]
    except RecursionError as error:
        raise ApiError("tools is nested too deep", param="tools") from error
    return {"anyOf": calls}


def _moved(schema: Any, place: str) -> Any:
    """The schema as a part of another one, at ``place``: references to its own parts begin at the root of the whole, or
    at a part with an ``$id``.
    """
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = f"#{place}{target[1:]}"
    return moved
