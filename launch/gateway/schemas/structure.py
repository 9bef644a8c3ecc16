"""The form that an answer must have."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field

from ..errors import ApiError
from .base import ANYTHING, ApiModel, List, Neutral


class JsonSchema(ApiModel):
    """A named JSON schema. It is always enforced, whatever ``strict`` says."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    """Text, or JSON: any object, or what follows a schema, which may also stand beside ``json_object``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="of json_object: the schema of the object, as in llama.cpp"
    )
    value: dict[str, Any] | None = Field(
        default=None, description="as schema, which Hugging Face's InferenceClient and TGI call so"
    )


class StructuredOutputs(ApiModel):
    """The form of the answer in vLLM's format: exactly one of the fields."""

    NEUTRAL: ClassVar[Neutral] = {
        "disable_fallback": ANYTHING,
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "structural_tag": (),
    }
    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = None
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = Field(None, description="a context-free grammar, in Lark's syntax or in GBNF")

    def form(self) -> dict[str, Any]:
        """The form for the pipeline.

        Raises:
            ApiError: none or several are given, or a schema that is not JSON.
        """
        given = {name: value for name in _FORMS if (value := getattr(self, name)) not in (None, False)}
        if len(given) != 1:
            raise ApiError(f"exactly one form is needed, got {len(given)}", param="structured_outputs")
        [(name, value)] = given.items()
        if name == "json_":
            return {"json_schema": _schema(value)}
        return {name: value}


_FORMS = ("json_", "json_object", "regex", "choice", "grammar")


def _schema(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _not_a_schema(f"is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise _not_a_schema(f"must be a JSON object, got {value!r:.80}")
    return schema


def _not_a_schema(reason: str) -> ApiError:
    return ApiError(f"structured_outputs.json {reason}", param="structured_outputs.json")
