"""What a JSON schema means as the form of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keywords that say which names there may be beside those in "properties".
_EXTENDING = frozenset((
    "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties",
))  # fmt: skip
# Keywords by which several schemas count for one object: always, or beside "properties".
_JOINING = frozenset(("allOf", "not", "if", "dependentSchemas", "$dynamicRef"))
_BRANCHING = frozenset(("anyOf", "oneOf", "$ref"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))  # maps of schemas
_NESTED = frozenset(("items", "prefixItems", "anyOf", "oneOf", "additionalProperties"))  # a schema or a list of them


def closed(schema: Any) -> Any:
    """The schema, whose objects have only the properties that they declare, unless they say otherwise.

    By the standard they may have any others. Hardly an author means that, and the forms of other servers do not allow
    it. A schema that joins others is returned as it is: each would exclude what only the others declare.

    Raises:
        RecursionError: it is nested too deeply.
    """
    try:
        return _closed(schema)
    except _JoinsError:
        return schema


def extends(schema: Mapping[str, Any]) -> bool:
    """Whether it may allow names beside those in its "properties"."""
    return not schema.keys().isdisjoint(_EXTENDING | _JOINING | _BRANCHING)


class _JoinsError(Exception):
    """The schema joins others."""


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    names = schema.keys()
    if not names.isdisjoint(_JOINING) or ("properties" in names and not names.isdisjoint(_BRANCHING)):
        raise _JoinsError
    new = schema.copy()
    for name in names & _NESTED:
        new[name] = _closed(schema[name])
    for name in names & _NAMED:
        if isinstance(named := schema[name], dict):
            new[name] = {key: _closed(part) for key, part in named.items()}
    if _declares_all(schema):
        new["additionalProperties"] = False
    return new


def _declares_all(schema: Mapping[str, Any]) -> bool:
    declared, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(declared, dict) or not declared or not isinstance(required, list):
        return False
    return _EXTENDING.isdisjoint(schema) and all(isinstance(name, str) and name in declared for name in required)
