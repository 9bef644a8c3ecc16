"""The field ``structured``: its forms, and the errors for invalid ones."""

from __future__ import annotations

import math
from typing import Any

import pytest

from triptych.protocol.errors import InvalidRequest
from triptych.protocol.grammar import MAX_SOURCE_BYTES
from triptych.workers.prepare.request import GenerationRequest
from triptych.workers.prepare.structured import MAX_CHOICE_CHARS, MAX_CHOICES, Structured


def parse(value: Any, **fields: Any) -> Structured | None:
    return GenerationRequest.from_wire({"prompt": "x", "structured": value, **fields}).structured


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ({"json_object": True}, Structured("json_schema", '{"type": "object"}')),
        ({"json_schema": {"type": "integer"}}, Structured("json_schema", '{"type": "integer"}')),
        ({"regex": "a+"}, Structured("regex", "a+")),
        ({"regex": r"a\\"}, Structured("regex", r"a\\")),
        ({"grammar": 'start: "a"'}, Structured("lark", 'start: "a"')),
        ({"choice": ["yes", 'a "quote"']}, Structured("lark", 'start: "yes" | "a \\"quote\\""')),
        ({"choice": ["a\x7f", "\n"]}, Structured("lark", r'start: "a\u007f" | "\n"')),  # raw, neither would compile
    ],
    ids=lambda value: str(value)[:30],
)
def test_each_form_is_accepted(value: Any, expected: Structured | None) -> None:
    assert parse(value) == expected


@pytest.mark.parametrize("asked", [True, False])
def test_form_may_begin_after_reasoning(asked: bool) -> None:
    assert parse({"regex": "a+", "after_reasoning": asked}) == Structured("regex", "a+", asked)


REFUSED: dict[str, tuple[Any, str]] = {
    "a string": ("json", "must be a map with exactly one of json_schema, json_object, regex, grammar, choice"),
    "nothing": ({}, "must be a map with exactly one of"),
    "nothing after reasoning": ({"after_reasoning": True}, "must be a map with exactly one of"),
    "a number for whether it may be a call": ({"regex": "a", "or_call": 1}, ".or_call must be a bool, got 1"),
    "a number for whether it reasons": ({"regex": "a", "after_reasoning": 1}, ".after_reasoning must be a bool, got 1"),
    "two forms": ({"regex": "a", "choice": ["a"]}, "got ['choice', 'regex']"),
    "an unknown form": ({"xml": True}, "got ['xml']"),
    "a number for a name": ({1: True}, "got ['1']"),
    "a schema in a string": ({"json_schema": "{}"}, "json_schema must be a map"),
    "a schema with bytes": ({"json_schema": {"const": b"x"}}, "json_schema is not JSON"),
    "a schema with nan": ({"json_schema": {"const": math.nan}}, "json_schema is not JSON"),
    "an object that is false": ({"json_object": False}, "json_object must be true"),
    "an empty expression": ({"regex": ""}, "regex must be a non-empty string"),
    "half an escape": ({"regex": "a\\"}, "regex ends with a backslash that escapes nothing"),
    "a grammar in a list": ({"grammar": ["a"]}, "grammar must be a non-empty string"),
    "no choice": ({"choice": []}, f"choice must be an array of 1 to {MAX_CHOICES} strings"),
    "choices in a string": ({"choice": "ab"}, f"choice must be an array of 1 to {MAX_CHOICES} strings, got 'ab'"),
    "too many choices": ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"choice must be an array of 1 to {MAX_CHOICES}"),
    "an empty choice": ({"choice": [""]}, f"strings of 1 to {MAX_CHOICE_CHARS} characters, got ''"),
    "a choice that is a number": ({"choice": [1]}, "got 1"),
    "too large": (
        {"regex": "a" * (MAX_SOURCE_BYTES + 1)},
        f"regex has {MAX_SOURCE_BYTES + 1} bytes, the limit is {MAX_SOURCE_BYTES}",
    ),
}


@pytest.mark.parametrize(("value", "reason"), REFUSED.values(), ids=REFUSED)
def test_bad_form_is_named_with_its_value(value: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(value)
    assert caught.value.param == "structured"
    assert reason in caught.value.message


def test_structured_and_ignore_eos_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos") as caught:
        parse({"regex": "a"}, ignore_eos=True)
    assert caught.value.param == "structured"
