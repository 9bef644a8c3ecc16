"""Addresses and methods that a route has, and those that none has."""

from __future__ import annotations

import resource

import pytest

from tests.launch.gateway.conftest import Site, site
from triptych import Driver
from triptych.launch.gateway.errors import error_map
from triptych.protocol.errors import Overloaded

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/images/generations", 404), ("GET", "/docs", 404), ("GET", "/redoc", 404), ("GET", CHAT, 405)],
)
def test_unknown_route_gives_an_error_of_the_same_shape(api: Site, method: str, path: str, status: int) -> None:
    reply = api.http.request(method, path)
    assert reply.status_code == status
    message = reply.json()["error"]["message"]
    assert path in message
    assert status != 404 or "generates text: POST /v1/chat/completions" in message


def test_client_of_another_server_that_asks_the_bare_address_learns_the_routes(api: Site) -> None:
    reply = api.http.post("/", json={"inputs": "Once"})  # as TGI's clients do
    assert reply.status_code == 405
    assert "generates text: POST /v1/chat/completions" in reply.json()["error"]["message"]


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


def test_reply_to_a_wrong_method_waits_for_no_document(pipeline: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 0.1 s to make, in which no stream goes on."""
    monkeypatch.delattr("triptych.launch.gateway.app.describe")
    with site(pipeline.run_dir) as api:
        assert api.http.post("/version").status_code == 405


def test_full_journal_is_not_blamed_on_a_field_of_the_pipeline_that_http_does_not_have() -> None:
    assert error_map(Overloaded("full", param="lease_s"))["error"]["param"] is None


def test_slash_at_the_end_makes_no_difference(pipeline: Driver) -> None:
    """A redirect named the host and http, which is not what the client of a proxy with TLS has asked."""
    with site(pipeline.run_dir, api_key="k") as api:
        body, headers = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, {"x-api-key": "k"}
        statuses = [api.http.post(f"{CHAT}/", json=body, headers=each).status_code for each in (headers, {})]
        assert (statuses, api.http.get("/health/").status_code) == ([200, 401], 200)


def test_gateway_without_a_free_file_descriptor_asks_to_try_later(pipeline: Driver) -> None:
    """Connections may take them all; that was an internal error, after which clients do not try again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with site(pipeline.run_dir) as api:  # new: it has not read the files that these routes need
        api.http.get("/version")  # opens the connection
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            replies = [api.http.get(path) for path in ("/metrics", "/v1/models")]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for reply in replies:
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], reply.headers["retry-after"]) == (503, "out_of_files", "1")
            assert "no file can be opened: Too many open files" in error["message"]
        assert api.http.get("/metrics").status_code == 200
