"""Addresses and methods that a route has, and those that none has."""

from __future__ import annotations

import pytest

from tests.launch.gateway.conftest import Site

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/v1/embeddings", 404), ("GET", CHAT, 405)])
def test_unknown_route_gives_an_error_of_the_same_shape(api: Site, method: str, path: str, status: int) -> None:
    reply = api.http.request(method, path)
    assert reply.status_code == status
    message = reply.json()["error"]["message"]
    assert path in message
    assert status != 404 or "generates text: POST /v1/chat/completions" in message


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/", {"GET", "HEAD"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("POST", "/server_info", {"GET"}),
        ("POST", "/openapi.json", {"GET", "HEAD"}),
        ("DELETE", "/v1/models/hash-lm", {"GET"}),
        ("POST", "/v1/requests/x", {"GET", "DELETE"}),
    ],
)
def test_wrong_method_lists_the_allowed_ones(api: Site, method: str, path: str, allowed: set[str]) -> None:
    reply = api.http.request(method, path)
    assert (reply.status_code, set(reply.headers["allow"].split(", "))) == (405, allowed)
