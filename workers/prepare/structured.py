"""The field ``structured`` of a request: the form that an answer must have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from ...protocol.errors import InvalidRequest
from ...protocol.grammar import MAX_SOURCE_BYTES

MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 1024
AFTER_REASONING, OR_CALL = "after_reasoning", "or_call"

Kind = Literal["json_schema", "regex", "lark"]


class Structured(NamedTuple):
    """A form in one of the three languages that the compiler accepts."""

    kind: Kind
    source: str  # a JSON schema as JSON, a regular expression, or a grammar in Lark's notation
    after_reasoning: bool = False  # the form begins after the reasoning of the answer, if there is any
    or_call: bool = False  # after reasoning in channels, a call may take its place


def checked_structured(value: Any) -> Structured | None:
    """The form in a decoded map with exactly one of the fields of ``FORMS``, and possibly the two others.

    Does not check whether it compiles.

    Raises:
        InvalidRequest: the map or its field is not as specified in docs/protocol.md.
    """
    if value is None:
        return None
    given = [name for name in value if name not in (AFTER_REASONING, OR_CALL)] if isinstance(value, dict) else []
    if len(given) != 1 or given[0] not in FORMS:
        got = f"{sorted(map(str, value))!r:.80}" if isinstance(value, dict) else f"{value!r:.80}"
        raise refusal(f"must be a map with exactly one of {', '.join(FORMS)}, got {got}")
    [name], form = given, value[given[0]]
    structured = FORMS[name](form)
    size = len(structured.source.encode("utf-8", "surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        raise refusal(f".{name} has {size} bytes, the limit is {MAX_SOURCE_BYTES}")
    after_reasoning, or_call = (_flag(value, flag) for flag in (AFTER_REASONING, OR_CALL))
    return structured._replace(after_reasoning=after_reasoning, or_call=or_call)


def _flag(value: Mapping[str, Any], name: str) -> bool:
    flag = value.get(name, False)
    if not isinstance(flag, bool):
        raise refusal(f".{name} must be a bool, got {flag!r:.80}")
    return flag


def refusal(reason: str) -> InvalidRequest:
    glue = "" if reason.startswith(".") else " "
    return InvalidRequest(f"structured{glue}{reason}", param="structured")


def _json_schema(value: Any) -> Structured:
    if not isinstance(value, dict):
        raise refusal(f".json_schema must be a map, got {value!r:.80}")
    try:
        return Structured("json_schema", json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal(f".json_schema is not JSON: {error}") from error


def _json_object(value: Any) -> Structured:
    if value is not True:
        raise refusal(f".json_object must be true, got {value!r:.80}")
    return Structured("json_schema", '{"type": "object"}')


def _regex(value: Any) -> Structured:
    expression = _text("regex", value)
    if (len(expression) - len(expression.rstrip("\\"))) % 2:  # the compiler would silently ignore it
        raise refusal(f".regex ends with a backslash that escapes nothing: {expression[-80:]!r}")
    return Structured("regex", expression)


def _grammar(value: Any) -> Structured:
    return Structured("lark", _text("grammar", value))


def _choice(value: Any) -> Structured:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise refusal(f".choice must be an array of 1 to {MAX_CHOICES} strings, got {value!r:.80}")
    for choice in value:
        if not isinstance(choice, str) or not 1 <= len(choice) <= MAX_CHOICE_CHARS:
            raise refusal(f".choice must hold strings of 1 to {MAX_CHOICE_CHARS} characters, got {choice!r:.80}")
    # Lark writes strings like JSON, but takes no control character as it is, and JSON leaves one of them.
    written = [json.dumps(choice, ensure_ascii=False).replace("\x7f", r"\u007f") for choice in value]
    return Structured("lark", f"start: {' | '.join(written)}")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise refusal(f".{name} must be a non-empty string, got {value!r:.80}")
    return value


FORMS: dict[str, Callable[[Any], Structured]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
}
