"""The OpenAPI document: FastAPI's, with our errors in place of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .errors import MESSAGES

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGE_ERROR = {
    **_ERROR,
    "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, **_ERROR["properties"]},
}
_STATUSES = {
    "400": "a field is unknown, of the wrong type, or outside its limits; param names it",
    "401": "no valid API key",
    "404": "no such model, request or route",
    "408": "the body did not arrive in time",
    "409": "another request with this id is live",
    "413": "the body is too large",
    "415": "the body is compressed",
    "429": "a queue is full: try again after Retry-After seconds",
    "500": "the request failed",
    "503": "the pipeline is loading, stopping, or unhealthy",
    "504": "a deadline passed",
}
_OPEN = ("/health", "/ready")
_MORE_STATUSES = {
    path: {"403": "--lora-root is not set"} for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document, generated once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        schemas |= {"Error": _ERROR, "MessageError": _MESSAGE_ERROR}
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        for path, methods in document["paths"].items():
            for operation in methods.values():
                error = "MessageError" if path.startswith(MESSAGES) else "Error"
                statuses = _STATUSES | _MORE_STATUSES.get(path, {})
                _describe(operation, error, statuses, needs_key=path not in _OPEN)
        app.openapi_schema = document
    return app.openapi_schema


def _describe(operation: dict[str, Any], error: str, statuses: Mapping[str, str], *, needs_key: bool) -> None:
    operation["responses"].pop("422", None)
    for status, text in statuses.items():
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
        operation["responses"].setdefault(status, {"description": text, "content": content})
    if needs_key:
        operation["security"] = [{}, {"key": []}, {"header": []}]
