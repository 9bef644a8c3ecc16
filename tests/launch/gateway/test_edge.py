"""Limits, ids and disconnects: what surrounds a request."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections import deque
from collections.abc import Iterator
from http.client import HTTPResponse
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
from anyio import move_on_after

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.sse import events
from tests.waiting import eventually
from triptych import Driver
from triptych.launch.gateway.config import GatewayConfig
from triptych.launch.terminal.logs import JsonFormatter
from triptych.protocol.errors import ConfigError

PATH = "/v1/completions"
LONG = {"prompt": "hi", "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(name="slow")
def fixture_slow(slow: Driver) -> Iterator[Driver]:
    """The pipeline with slow steps; after each test, all that its readers left has ended."""
    yield slow
    eventually(lambda: slow.stats()["summarize"]["live"] == 0)


def num_aborted(driver: Driver) -> int:
    return int(driver.stats()["summarize"]["finished"].get("abort", 0))


def live(api: Site) -> int:
    assert api.driver is not None
    return int(api.driver.stats()["summarize"]["live"])


def raw(api: Site) -> socket.socket:
    host, port = api.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 10)


def head_of(num_bytes: int, path: str = PATH) -> bytes:
    """The head of a request with a body."""
    lines = ("host: a", "content-type: application/json", f"content-length: {num_bytes}", "", "")
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines]).encode()


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/v1/models", "/"])
def test_monitor_may_ask_for_the_status_alone(api: Site, path: str) -> None:
    """As ``wget --spider`` and ``curl --head`` do; the reply is that of GET without its body."""
    reply = api.http.head(path)
    assert (reply.status_code, reply.content) == (200, b"")
    assert reply.headers["content-type"] == api.http.get(path).headers["content-type"]


@pytest.mark.parametrize("endpoint", ["", "collector:4318", "http://", "http:///v1/traces", "grpc://collector:4317"])
def test_traces_endpoint_must_be_an_http_url(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=f"otlp_traces_endpoint is '{endpoint}', must be http"):
        GatewayConfig(otlp_traces_endpoint=endpoint)


def test_empty_model_name_is_refused() -> None:
    """An unset variable in a unit file: every request that names the model would be a 404."""
    with pytest.raises(ConfigError, match="served_model_name is empty"):
        GatewayConfig(served_model_name=("mine", ""))


def test_oversized_body_is_refused(pipeline: Driver) -> None:
    with site(pipeline.run_dir, max_body_bytes=2000) as api:
        reply = api.post(PATH, prompt="x" * 3000)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
        chunks = (b'{"prompt": "', *[b"x" * 500] * 6, b'"}')
        reply = api.http.post(PATH, content=iter(chunks), headers={"content-type": "application/json"})
        assert reply.status_code == 413
        api.ask(PATH, prompt="x", max_tokens=1)


def test_body_that_does_not_arrive_times_out(pipeline: Driver) -> None:
    with site(pipeline.run_dir, body_timeout_s=0.2) as api, raw(api) as connection:
        connection.sendall(head_of(50) + b"{")
        assert b" 408 " in connection.recv(4096).splitlines()[0]


@pytest.mark.parametrize("before", [b"", b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"], ids=["first", "second"])
@pytest.mark.parametrize("begun", [b"", b"POST / HTTP/1.1\r\nhost: "], ids=["nothing", "half"])
def test_headers_that_do_not_arrive_time_out(pipeline: Driver, before: bytes, begun: bytes) -> None:
    with site(pipeline.run_dir, body_timeout_s=0.2, keep_alive_s=1) as api, raw(api) as connection:
        if before:
            connection.sendall(before)
            reply = b""
            while not reply.endswith(b"}"):
                reply += connection.recv(4096)
        connection.sendall(begun)
        assert connection.recv(4096) == b""


BEGINNINGS = {
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03": "TLS",
    b"PROXY TCP4 192.0.2.1 192.0.2.2 5000 80\r\nGET / HTTP/1.1\r\n\r\n": "the PROXY protocol",
    b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c": "the PROXY protocol",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": "HTTP/2",
}


def test_client_that_speaks_another_protocol_is_told_so_and_the_log_once(
    pipeline: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    with site(pipeline.run_dir) as api:
        for beginning, spoken in [*BEGINNINGS.items()] * 2:
            with raw(api) as connection:
                connection.sendall(beginning)
                reply = connection.makefile("rb").read()
            assert reply.startswith(b"HTTP/1.1 400 ")
            assert f"speaks {spoken}".encode() in reply
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "--ssl-certfile" in warned[0]
    assert [text.partition("speaks ")[2].partition(",")[0] for text in warned] == [
        "TLS", "the PROXY protocol", "HTTP/2 from its first byte",
    ]  # fmt: skip


def test_answer_may_take_longer_than_the_header_timeout(slow: Driver) -> None:
    with site(slow.run_dir, body_timeout_s=0.1) as api:
        assert api.post(PATH, **{**LONG, "max_tokens": 100}).status_code == 200


def test_slow_request_is_ended_at_its_timeout(slow: Driver) -> None:
    with site(slow.run_dir, request_timeout_s=0.3) as api:
        reply = api.post(PATH, **LONG)
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")
        with api.http.stream("POST", PATH, json={**LONG, "stream": True}) as streamed:
            *_, error, done = events(streamed)
        assert (error.data["error"]["code"], done.data) == ("timeout", "[DONE]")
        eventually(lambda: slow.stats()["summarize"]["live"] == 0)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "asked", "num_waits"), [(PATH, {"prompt": "hi"}, 2), ("/v1/chat/completions", CHAT, 4)], ids=["", "thinks"]
)
def test_timeout_of_a_request_includes_the_wait_for_its_acceptance(
    pipeline: Driver, path: str, asked: dict[str, Any], num_waits: int, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for a reasoning model's chat, the lookup of how its prompt ends."""
    limits: list[float] = []

    def fail_after(limit_s: float) -> object:
        limits.append(limit_s)
        return move_on_after(None)

    with site(pipeline.run_dir, request_timeout_s=1000, reasoning_parser="think") as api:
        monkeypatch.setattr("triptych.launch.gateway.serving.streaming.anyio", SimpleNamespace(fail_after=fail_after))
        assert api.post(path, **asked, max_tokens=1, stream=stream).status_code == 200
    assert (len(limits), limits[0]) == (num_waits, 1000)
    assert limits == sorted(set(limits), reverse=True)


@pytest.mark.parametrize("next_request", [b"", b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"], ids=["", "pipelined"])
@pytest.mark.parametrize("stream", [True, False])
def test_request_is_aborted_when_its_client_disconnects(slow: Driver, stream: bool, next_request: bytes) -> None:
    before = num_aborted(slow)
    with site(slow.run_dir) as api:
        api.driver = slow
        body = json.dumps({**LONG, "stream": stream, "n": 2}).encode()
        with raw(api) as connection:
            connection.sendall(head_of(len(body)) + body + next_request)
            eventually(lambda: live(api) == 2)
        eventually(lambda: live(api) == 0, timeout=5)
        assert num_aborted(slow) == before + 2


def test_request_whose_echo_fails_is_aborted(slow: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_aborted(slow)
    with site(slow.run_dir) as api:
        monkeypatch.setattr(api.gateway.words, "decode", lambda _: 1 / 0)
        reply = api.post(PATH, **{**LONG, "prompt": [1, 2], "echo": True, "stream": True})
        assert "internal error" in reply.text
        eventually(lambda: num_aborted(slow) == before + 1, timeout=5)


def test_request_id_is_the_client_s_or_a_new_one(api: Site) -> None:
    assert api.http.get("/version", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    drawn = {api.http.get("/version", headers={"x-request-id": "x" * 500}).headers["x-request-id"] for _ in range(2)}
    assert len(drawn) == 2
    assert api.http.get("/nowhere").headers["x-request-id"]


def test_request_id_is_found_by_anthropic_s_clients_too(api: Site) -> None:
    reply = api.post("/v1/messages")
    assert (reply.status_code, reply.headers["request-id"]) == (400, reply.headers["x-request-id"])


def num_live_and_waiting(driver: Driver) -> tuple[int, int]:
    prepare = driver.stats()["prepare"]
    return prepare["live"], prepare["waiting"]


def test_full_queue_is_a_429_with_retry_after() -> None:
    with Driver("hash-lm", hash_step_ms=20, max_num_seqs=1, max_queue=2) as small, site(small.run_dir) as api:
        # The first two get a credit each; the others wait.
        for number, wanted in enumerate([(1, 0), (2, 0), (2, 1), (2, 2)]):
            small.submit("hi", max_tokens=3000, request_id=f"r{number}").accepted(10)
            eventually(lambda wanted=wanted: num_live_and_waiting(small) == wanted)  # type: ignore[misc]
        reply = api.post(PATH, prompt="hi")
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json()["error"]["type"] == "rate_limit_error"
        for number in range(4):
            small.abort(f"r{number}")


def test_path_cannot_inject_lines_into_the_log(api: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "triptych.launch.gateway.serving.edge"):
        api.http.get("/no%0Awhere%1B%5B2J", headers={"x-request-id": "forger"})
        record = eventually(lambda: next((r for r in caplog.records if "forger" in r.getMessage()), None))
    assert record.getMessage().isprintable()


def test_long_path_is_cut_in_the_log_and_in_the_reply(api: Site, caplog: pytest.LogCaptureFixture) -> None:
    """It needs no key, and may be as long as all headers."""
    with caplog.at_level(logging.INFO, "triptych.launch.gateway.serving.edge"):
        reply = api.http.get("/" + "a" * 30_000, headers={"x-request-id": "long"})
        record = eventually(lambda: next((r for r in caplog.records if "long" in r.getMessage()), None))
    assert (reply.status_code, "/aaaa" in reply.text, "/aaaa" in record.getMessage()) == (404, True, True)
    assert len(JsonFormatter("gateway 0").format(record)) < 1500
    assert len(reply.text) < 1000


def test_log_has_one_line_per_request_and_no_prompt(api: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "triptych.launch.gateway.serving.edge"):
        api.http.post(PATH, json={"prompt": "a secret", "max_tokens": 1}, headers={"x-request-id": "find-me"})
        record = eventually(lambda: next((r for r in caplog.records if "find-me" in r.getMessage()), None))
    entry = json.loads(JsonFormatter("gateway 0").format(record))
    assert (entry["status"], entry["path"], entry["x_request_id"]) == (200, PATH, "find-me")
    assert entry["request_id"].startswith("cmpl-")
    assert "secret" not in json.dumps(entry)


def test_log_line_has_both_ids(api: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "triptych.launch.gateway.serving.edge"):
        reply = api.http.post(PATH, json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "both"})
        record = eventually(lambda: next((r for r in caplog.records if "both" in r.getMessage()), None))
    assert reply.json()["id"] in record.getMessage()


def test_client_that_leaves_before_the_end_of_a_stream_counts_as_disconnected(slow: Driver) -> None:
    with site(slow.run_dir) as api:
        assert len(list(events_of(api, max_tokens=2))) > 2
        eventually(lambda: api.gateway.counters.num_open == 0)
        assert api.gateway.counters.num_disconnects == 0
        next(events_of(api, **LONG))
        eventually(lambda: api.gateway.counters.num_disconnects == 1)


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
@pytest.mark.parametrize(
    "cut",
    [b"POST", b"host", b"Upgrade:", b"grade:", b": %", b'"max_tokens'],
    ids=["whole", "in the head", "before the offer", "in its name", "after its name", "in the body"],
)
def test_offer_of_another_protocol_is_ignored(api: Site, upgrade: str, cut: bytes) -> None:
    """Java's client offers HTTP/2 with the first request of every connection; the request's body was lost."""
    body = json.dumps({"prompt": "Upgrade: no", "max_tokens": 0, "echo": True}, indent=0).encode()
    head = head_of(len(body)).replace(b"\r\n\r\n", f"\r\nConnection: Upgrade\r\nUpgrade: {upgrade}\r\n\r\n".encode())
    request = head + body
    at = request.index(cut.replace(b"%", upgrade.encode()))
    with raw(api) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):  # the connection goes on
            reply = HTTPResponse(connection)
            for piece in (request[:at], request[at:]):
                connection.sendall(piece)
                time.sleep(0.05)  # else both may arrive as one
            reply.begin()
            assert (reply.status, json.load(reply)["choices"][0]["text"]) == (200, "Upgrade: no")


@pytest.mark.parametrize("path", [f"/{PATH}", f"http://a//{PATH}/"], ids=["path", "whole address"])
def test_more_slashes_at_the_beginning_make_no_difference(api: Site, path: str) -> None:
    """Many clients append the path to an address that ends with a slash."""
    body = b'{"prompt": "hi", "max_tokens": 1}'
    with raw(api) as connection:
        connection.sendall(head_of(len(body), path) + body)
        reply = HTTPResponse(connection)
        reply.begin()
        assert reply.status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_client_of_http_1_0_gets_no_chunks(api: Site, stream: bool) -> None:
    """As ``ab`` and nginx, by default, are: they took the sizes of the chunks for a part of the reply."""
    body = json.dumps({"prompt": "hi", "max_tokens": 3, "stream": stream}).encode()
    with raw(api) as connection:
        connection.sendall(head_of(len(body)).replace(b"HTTP/1.1", b"HTTP/1.0") + body)
        reply = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, content = reply.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert content.startswith(b"data: {") and content.endswith(b"data: [DONE]\n\n") if stream else json.loads(content)


def events_of(api: Site, **body: object) -> Iterator[object]:
    """The events of a stream, whose connection closes when the caller stops iterating."""
    with api.http.stream("POST", PATH, json={"prompt": "hi", "stream": True, **body}) as reply:
        yield from events(reply)


ENDLESS = {
    "headers": b"GET /version HTTP/1.1\r\nhost: a\r\n",
    "trailers": b"POST /version HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
}


@pytest.mark.parametrize("line", [b"a: " + b"b" * 1000 + b"\r\n", b"b" * 1000], ids=["lines", "one line"])
@pytest.mark.parametrize("head", ENDLESS)
def test_endless_headers_are_not_buffered(pipeline: Driver, head: str, line: bytes) -> None:
    with site(pipeline.run_dir, body_timeout_s=300) as api, raw(api) as connection:
        connection.sendall(ENDLESS[head])
        with pytest.raises(ConnectionError):  # the first piece is small, and buffers take some more
            deque(map(connection.sendall, repeat(line, 8 << 10)), maxlen=0)
        reply = connection.recv(1 << 16)
        status = {"headers": b"431 Request Header Fields Too Large", "trailers": b"405 Method Not Allowed"}[head]
        assert (reply.split(b"\r\n")[0], reply.count(b"HTTP/1.1")) == (b"HTTP/1.1 " + status, 1)
