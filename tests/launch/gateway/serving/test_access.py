"""Who may send requests: keys, and the origins of pages in a browser."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.launch.gateway.conftest import site
from triptych import Driver
from triptych.launch.gateway.config import GatewayConfig, is_known_key
from triptych.launch.gateway.serving.api_keys import ApiKeys
from triptych.protocol.errors import ConfigError

PATH = "/v1/completions"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def test_every_route_except_the_probes_requires_a_key(pipeline: Driver, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nfirst\nsecond\n")
    with site(pipeline.run_dir, api_key="third", api_key_file=str(tmp_path / "keys")) as api:
        assert {api.http.get(path).status_code for path in ("/health", "/ping", "/ready")} == {200}
        for path in ("/metrics", "/v1/models", "/openapi.json", "/server_info", "/nowhere", "/docs"):
            reply = api.http.get(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
        for key, status in (("first", 200), ("second", 200), ("third", 200), ("fourth", 401), ("# ours", 401)):
            assert api.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == status
        (tmp_path / "keys").write_text("first\nfourth\n")
        for key, status in (("second", 401), ("fourth", 200)):
            assert api.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == status
        info = api.http.get("/server_info", headers={"authorization": "bearer first"})
        assert "third" not in info.text


def test_keys_are_replaced_with_their_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, after = tmp_path / "keys", tmp_path / "after"
    file.write_text("first\n")
    keys = ApiKeys(GatewayConfig(api_key="always", api_key_file=str(file)))
    after.write_text("other\n")
    after.rename(file)
    assert keys.read() == ("always", "other")
    for spoil in (partial(file.write_text, "# none\n"), file.unlink):
        spoil()
        assert keys.read() == keys.read() == ("always", "other")
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    file.write_text("third\n")
    assert keys.read() == ("always", "third")


def test_keys_are_compared_as_a_whole() -> None:
    assert is_known_key(b"key", ("other", "key"))
    assert not any(is_known_key(given, ("key",)) for given in (b"", b"ke", b"key2", b"KEY"))


def test_key_may_end_in_a_line_break_and_use_any_script(pipeline: Driver) -> None:
    assert GatewayConfig(api_key="key\r\n").api_keys() == ("key",)
    with site(pipeline.run_dir, api_key="schlüssel\n") as api:
        for key, status in (("schlüssel", 200), ("schluessel", 401)):
            reply = api.http.get("/v1/models", headers=[(b"authorization", f"Bearer {key}".encode())])
            assert reply.status_code == status


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "contains no key"),
        (b"\n# nothing\n", "contains no key"),
        (b"fine\nschl\xfcssel\n", "is not UTF-8: byte 0xfc after 9 others"),
        ("key".encode("utf-16"), "is UTF-16, not UTF-8"),
    ],
)
def test_key_file_without_a_key_is_refused(tmp_path: Path, content: bytes | None, why: str) -> None:
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError, match=f"api_key_file .*keys {why}"):
        GatewayConfig(api_key_file=str(tmp_path / "keys")).api_keys()


def test_byte_order_mark_is_not_part_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\r\nsecond\r\n", encoding="utf-8-sig")
    assert GatewayConfig(api_key_file=str(tmp_path / "keys")).api_keys() == ("first", "second")


def test_pages_of_allowed_origins_may_send_requests_from_a_browser(pipeline: Driver) -> None:
    ours, theirs = "https://chat.example.org", "https://example.org"
    with site(pipeline.run_dir, api_key="secret", allowed_origin=(ours, "http://localhost:3000")) as api:
        asked = api.http.options(PATH, headers=PREFLIGHT | {"origin": ours})  # a browser sends no key with it
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, ours)
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        refused = api.http.options(PATH, headers=PREFLIGHT | {"origin": theirs})
        assert "access-control-allow-origin" not in refused.headers
        body, key = {"prompt": "hi", "max_tokens": 1}, {"authorization": "Bearer secret"}
        reply = api.http.post(PATH, json=body, headers=key | {"origin": ours})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, ours)
        assert reply.headers["access-control-expose-headers"] == "x-request-id, request-id, retry-after"
        refused = api.http.post(PATH, json=body, headers={"origin": ours})  # the page must be able to read an error too
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ours)
        stranger = api.http.post(PATH, json=body, headers=key | {"origin": theirs})
        assert "access-control-allow-origin" not in stranger.headers


def test_pages_of_other_origins_may_not_send_requests(pipeline: Driver) -> None:
    with site(pipeline.run_dir) as api:
        reply = api.http.post(PATH, json={"prompt": "hi", "max_tokens": 1}, headers={"origin": "https://example.org"})
        assert not [name for name in reply.headers if name.startswith("access-control")]
    with site(pipeline.run_dir, allowed_origin=("*",)) as api:
        reply = api.http.options(PATH, headers=PREFLIGHT | {"origin": "https://example.org"})
        assert reply.headers["access-control-allow-origin"] in ("*", "https://example.org")


@pytest.mark.parametrize(
    "origin", ["", "example.org", "https://example.org/", "https://a/chat", "https://", "ftp://a", "https://*.a"]
)
def test_malformed_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_origin is .*scheme://host"):
        GatewayConfig(allowed_origin=(origin,))
