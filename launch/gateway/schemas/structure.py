"""The form that an answer must have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .base import ApiModel


class JsonSchema(ApiModel):
    """A named JSON schema. The answer keeps to it whether ``strict`` says so or not."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    """``{"type": "text"}``, ``{"type": "json_object"}``, or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
