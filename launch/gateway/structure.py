"""Answers that must have a form: what the pipeline is asked for ``response_format``, ``structured_outputs`` and tools
that must be called. Whether it can keep a form is the pipeline's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import ApiError, unsupported
from .schemas.chat import Tool
from .schemas.structure import ResponseFormat, StructuredOutputs

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def structured_options(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> dict[str, Any]:
    """The options of a request whose answer must keep to a form; none for plain text.

    Raises:
        ApiError: no form is given, or two are.
    """
    if outputs is not None:
        if response_format is not None and response_format.type != "text":
            raise unsupported("structured_outputs", "response_format and structured_outputs do not go together")
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
    """The form of an answer that is nothing but the arguments of this tool."""
    return {"json_schema": tool.function.parameters or _ANY_OBJECT}


def calls_form(tools: Sequence[Tool], *, single: bool) -> dict[str, Any]:
    """The form of an answer that is a list of calls, one at least."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or _ANY_OBJECT,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    limits = {"minItems": 1, **({"maxItems": 1} if single else {})}
    return {"json_schema": {"type": "array", "items": {"anyOf": calls}, **limits}}
