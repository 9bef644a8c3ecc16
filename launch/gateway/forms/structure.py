"""Answers in a required form: the pipeline's options for ``response_format``, ``structured_outputs`` and forced tool
calls. Whether a form can be enforced is decided by the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ApiError, unsupported
from ..schemas.chat import Tool
from ..schemas.structure import ResponseFormat, StructuredOutputs
from ..state import Gateway
from ..tools.tagged import TAGGED
from .call_rules import call_rules
from .call_schemas import arguments_schema
from .grammar_text import json_rule
from .tagged_rules import tagged_rules


def structured_options(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> dict[str, Any]:
    """The options of a request whose answer must have a form; none for plain text.

    Raises:
        ApiError: no form is given, or two are.
    """
    if outputs is not None:
        if response_format is not None and response_format.type != "text":
            raise unsupported("structured_outputs", "response_format and structured_outputs exclude each other")
        return {"structured": outputs.form()}
    if response_format is None:
        return {}
    for field, beside in (("schema", response_format.schema_), ("value", response_format.value)):
        if beside is not None and response_format.type != "json_object":
            raise ApiError(f"response_format.{field} belongs to json_object", param=f"response_format.{field}")
    if response_format.type == "text":
        return {}
    if response_format.type == "json_object":
        schema = response_format.schema_ or response_format.value
        return {"structured": {"json_schema": schema} if schema else {"json_object": True}}
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        param = "response_format.json_schema"
        raise ApiError(f"{param}.schema is required", code="missing_required_parameter", param=param)
    return {"structured": {"json_schema": response_format.json_schema.schema_}}


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
    if (tagged := TAGGED.get(gateway.tool_parser)) is not None:
        signatures = [(tool.function.name, arguments_schema(tool)) for tool in tools]
        calls: list[str] | None = tagged_rules(gateway.words, signatures, tagged, single=single)
    else:
        template = gateway.facts.chat_template or ""
        calls = call_rules(gateway.words, tools, gateway.tool_parser, template, single=single)
    if calls is None:
        return None
    rules = ["start: text | calls", f"text: {json_rule(schema, 'structured')}", *calls, r"SPACE: /[ \n]{0,2}/"]
    return {"grammar": "\n".join(rules)}
