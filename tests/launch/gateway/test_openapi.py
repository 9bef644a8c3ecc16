"""The OpenAPI document describes what the gateway does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site

ROUTES = {
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/v1/models/{model_id}", "/tokenize",
    "/detokenize", "/health", "/ready", "/metrics", "/version", "/server_info", "/v1/requests/{request_id}",
    "/v1/decisions", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/v1/responses/input_tokens", "/v1/rerank", "/v1/score",
}  # fmt: skip
PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")


@pytest.fixture
def document(api: Site) -> Any:
    return api.http.get("/openapi.json").json()


def test_every_route_is_in_the_document_and_in_docs_http(document: Any) -> None:
    assert set(document["paths"]) == ROUTES
    assert {route for route in ROUTES if route not in PAGE} == set()


def test_errors_of_each_route_have_the_shape_of_its_api(document: Any) -> None:
    for path, methods in document["paths"].items():
        shape = "MessageError" if path.startswith("/v1/messages") else "Error"
        for operation in methods.values():
            assert "422" not in operation["responses"]
            error = operation["responses"]["400"]["content"]["application/json"]["schema"]
            assert error == {"$ref": f"#/components/schemas/{shape}"}


@pytest.mark.parametrize(
    "name",
    [
        "CompletionRequest",
        "ChatRequest",
        "ResponseRequest",
        "DecisionRequest",
        "MessageRequest",
        "CountRequest",
        "InputTokensRequest",
    ],
)
def test_request_schemas_are_closed_and_their_fields_documented(document: Any, name: str) -> None:
    schema = document["components"]["schemas"][name]
    assert schema["additionalProperties"] is False
    offered = [field for field, value in schema["properties"].items() if "accepted" not in value.get("description", "")]
    assert [field for field in offered if f"`{field}`" not in PAGE] == []


def test_references_resolve(document: Any) -> None:
    text = json.dumps(document)
    names = set(document["components"]["schemas"])
    assert {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]} <= names


def test_ignored_fields_are_described(document: Any) -> None:
    properties = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert properties["store"]["enum"] == [None, False]
    assert properties["temperature"]["anyOf"][0]["maximum"] == 100


def test_content_types_are_those_of_the_replies(api: Site, document: Any) -> None:
    def promised(path: str, method: str) -> set[str]:
        return set(document["paths"][path][method]["responses"]["200"]["content"])

    assert promised("/metrics", "get") == {api.http.get("/metrics").headers["content-type"].partition(";")[0]}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert promised(path, "post") == {"application/json", "text/event-stream"}


def test_refusal_without_a_folder_for_adapters_is_described(api: Site, document: Any) -> None:
    for path, body in (("load", {"lora_name": "a", "lora_path": "a"}), ("unload", {"lora_name": "a"})):
        status, _ = api.refusal(f"/v1/{path}_lora_adapter", **body)
        described = document["paths"][f"/v1/{path}_lora_adapter"]["post"]["responses"]
        assert described[str(status)]["content"] == described["400"]["content"]


def test_wrong_method_lists_all_allowed_ones(api: Site) -> None:
    reply = api.http.request("OPTIONS", "/v1/requests/x")
    assert reply.status_code == 405
    assert set(reply.headers["allow"].split(", ")) == {"GET", "DELETE"}
