"""Schemas of the calls that an answer may consist of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....protocol.json_schema import extends
from ..errors import ApiError
from ..schemas.chat import Tool


def arguments_form(tool: Tool) -> dict[str, Any]:
    """The form of an answer that consists of the arguments of this tool."""
    return {"json_schema": arguments_schema(tool)}


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, allowing only declared ones unless it says otherwise.

    Other than in a schema's own objects, none declared means that a function takes none.
    """
    schema = tool.function.parameters or {"type": "object"}
    return schema if extends(schema) else {**schema, "additionalProperties": False}


def calls_form(tools: Sequence[Tool], *, single: bool) -> dict[str, Any]:
    """The form of an answer that is a list of at least one call.

    Raises:
        ApiError: the arguments of a tool are nested too deeply.
    """
    limits = {"minItems": 1, **({"maxItems": 1} if single else {})}
    return {"json_schema": {"type": "array", "items": call_schema(tools, "/items"), **limits}}


def call_schema(
    tools: Sequence[Tool], place: str = "", keys: tuple[str, ...] = ("name", "arguments")
) -> dict[str, Any]:
    """The schema of one call, as a part of another one at ``place``.

    ``keys``: of the name and of the arguments, behind those of texts that may precede them; none if the name itself is
    the key of the arguments.
    """
    try:
        calls = [_one_call(tool, f"{place}/anyOf/{index}/properties", keys) for index, tool in enumerate(tools)]
    except RecursionError as error:
        raise ApiError("tools is nested too deep", param="tools") from error
    return {"anyOf": calls}


def _one_call(tool: Tool, place: str, keys: tuple[str, ...]) -> dict[str, Any]:
    name = tool.function.name
    *texts, name_key, key = keys or (name,) * 2
    arguments = {key: _moved(arguments_schema(tool), f"{place}/{key}")}
    return {
        "type": "object",
        "properties": {**{each: {"type": "string"} for each in texts}, name_key: {"const": name}, **arguments},
        "required": [*dict.fromkeys((name_key, key))],
        "additionalProperties": False,
    }


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
