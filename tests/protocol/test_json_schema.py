"""Objects of a form have only what their schema declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from triptych.protocol.json_schema import closed

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
NESTED: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "items": ({"type": "array", "items": A}, lambda value: [value]),
    "prefixItems": ({"type": "array", "prefixItems": [A]}, lambda value: [value]),
    "anyOf": ({"anyOf": [{"type": "null"}, A]}, lambda value: value),
    "properties": ({"type": "object", "properties": {"a": A}}, lambda value: {"a": value}),
    "additionalProperties": ({"type": "object", "additionalProperties": A}, lambda value: {"x": value}),
    "$defs": ({"$ref": "#/$defs/A", "$defs": {"A": A}}, lambda value: value),
}


@pytest.mark.parametrize(("schema", "within"), NESTED.values(), ids=NESTED)
def test_object_has_no_undeclared_property_wherever_its_schema_stands(
    schema: dict[str, Any], within: Callable[[Any], Any]
) -> None:
    form = Draft202012Validator(closed(schema))
    assert form.is_valid(within({"a": 1}))
    assert not form.is_valid(within({"a": 1, "b": 2}))
    assert Draft202012Validator(schema).is_valid(within({"a": 1, "b": 2}))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**A, "additionalProperties": True},
        {**A, "patternProperties": {"^b": {}}},
        {**A, "minProperties": 2},
        {**A, "required": ["b"]},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}]},
        {"$defs": {"A": A}, "$ref": "#/$defs/A", "properties": {"b": {}}},
        {"anyOf": [A, {"required": ["c"]}], "properties": {"b": {}}},
        {"if": A, "then": {"properties": {"b": {}}}},
        {"not": {"properties": {"a": {"const": 5}}}},
    ],
    ids=str,
)
def test_object_that_may_have_others_still_may(schema: dict[str, Any]) -> None:
    assert Draft202012Validator(closed(schema)).is_valid({"a": 1, "b": 2})


@pytest.mark.parametrize(
    "schema", [True, {"properties": 5}, {"items": 5, "required": [[]], "properties": {"a": 1}}], ids=str
)
def test_what_is_no_schema_is_left_to_the_compiler(schema: Any) -> None:
    assert closed(schema) == schema
