"""Values of arguments that a model wrote as text: the tool's schema tells what they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .parser import UNREADABLE, arguments_text

_TYPES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
_PYTHON = {"True": True, "False": False, "None": None}  # which some templates write
_MAX_DEPTH = 16  # of references and alternatives


def value_of(text: str, schema: Mapping[str, Any], name: str) -> Any:
    """The value of the argument ``name``: of another type than text if the schema allows the one that it looks like, or
    allows no text. Without a schema it is what it looks like.
    """
    properties = schema.get("properties")
    types = types_of(properties.get(name) if isinstance(properties, Mapping) else None, schema)
    if types == {"string"}:
        return text
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else json.loads(text)
        arguments_text(value)  # fails for NaN
    except UNREADABLE:
        return text
    kind = _TYPES[type(value)]
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return value if (fits and kind != "string") or (types and "string" not in types) else text


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The JSON types that the schema, a part of ``root``, names; none if it allows any."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    if isinstance(kind := schema.get("type"), str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    if isinstance(values := schema.get("enum"), list):
        return {_TYPES.get(type(value), "") for value in values}
    if "const" in schema:
        return {_TYPES.get(type(schema["const"]), "")}
    if isinstance(target := schema.get("$ref"), str):
        return types_of(_part(root, target), root, depth + 1)
    parts = [part for word in ("anyOf", "oneOf", "allOf") if isinstance(part := schema.get(word), list)]
    found = [types_of(each, root, depth + 1) for part in parts for each in part]
    return set().union(*found) if all(found) else set()


def _part(root: Mapping[str, Any], target: str) -> Any:
    """What a reference within the schema refers to."""
    part: Any = root if target.startswith("#") else None
    for step in target.removeprefix("#").split("/")[1:]:
        part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part
