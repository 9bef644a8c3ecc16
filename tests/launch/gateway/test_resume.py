"""An answer survives the connection that requested it, the gateway, and any worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.scripted import SUMMARY
from tests.launch.gateway.sse import Event, events, text_of
from tests.launch.gateway.test_edge import head_of, raw
from tests.pipeline.checks import assert_quiet
from tests.waiting import eventually
from triptych import Driver
from triptych.driver.async_client import AsyncClient
from triptych.driver.async_stream import AsyncStream, Mailbox
from triptych.driver.standing import RequestStatus
from triptych.driver.stream import Completion
from triptych.protocol.errors import DeadlineExceeded

PATH = "/v1/completions"
WANTED = {"prompt": "tell me", "max_tokens": 150, "temperature": 0, "resumable": True}


def begin(api: Site, request_id: str, *, num_events: int) -> tuple[str, list[Event]]:
    """The reply's id and its first events, from a connection that is then closed."""
    with api.http.stream("POST", PATH, json={**WANTED, "stream": True, "request_id": request_id}) as reply:
        first = [event for event, _ in zip(events(reply), range(num_events), strict=False)]
    return first[0].data["id"], first


def rest(api: Site, request_id: str, **options: str | int) -> list[Event]:
    headers = {"last-event-id": str(options.pop("last_id"))} if "last_id" in options else {}
    with api.http.stream("GET", f"/v1/requests/{request_id}", params=options, headers=headers) as reply:
        assert reply.status_code == 200, reply.read()
        return list(events(reply))


def expected_text(api: Site) -> str:
    return str(api.ask(PATH, **{**WANTED, "resumable": False})["choices"][0]["text"])


@pytest.mark.parametrize("how", ["offset", "last_id"])
def test_stream_continues_where_it_stopped(slow: Driver, how: str) -> None:
    with site(slow.run_dir) as api:
        request_id, first = begin(api, f"a-{how}", num_events=20)
        known = first[-1].id
        assert known is not None
        found = rest(api, request_id, **{how: known})
        api.http.delete(f"/v1/requests/{request_id}")
        assert text_of(first) + text_of(found) == expected_text(api)
        assert found[-1].data == "[DONE]"
        assert found[-2].data["usage"]["completion_tokens"] == 150


def test_any_gateway_can_continue_even_after_all_workers_died(slow: Driver) -> None:
    with site(slow.run_dir) as api:
        request_id, first = begin(api, "b", num_events=20)
    for pid in slow.pids.values():
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    with site(slow.run_dir) as other:
        found = rest(other, request_id, offset=int(first[-1].id or 0))
        other.http.delete(f"/v1/requests/{request_id}")
        assert text_of(first) + text_of(found) == expected_text(other)


def test_ended_answer_can_be_read_again_and_then_forgotten(slow: Driver) -> None:
    with site(slow.run_dir) as api:
        whole = api.ask(PATH, **WANTED, request_id="c")
        again = api.http.get(f"/v1/requests/{whole['id']}", params={"stream": False}).json()
        assert again["choices"][0]["text"] == whole["choices"][0]["text"]
        assert text_of(rest(api, whole["id"])) == whole["choices"][0]["text"]
        assert api.http.delete(f"/v1/requests/{whole['id']}").json()["deleted"] is True
        eventually(lambda: api.http.get(f"/v1/requests/{whole['id']}").status_code == 404)
        assert_quiet(slow)


def test_delete_aborts_a_request(slow: Driver) -> None:
    with site(slow.run_dir) as api:
        request_id, _ = begin(api, "d", num_events=3)
        assert api.http.delete(f"/v1/requests/{request_id}").status_code == 200
        assert_quiet(slow)


def test_last_reader_takes_over(slow: Driver) -> None:
    with (
        site(slow.run_dir) as api,
        api.http.stream("POST", PATH, json={**WANTED, "stream": True, "request_id": "e"}) as reply,
    ):
        reading = events(reply)
        request_id = next(reading).data["id"]
        assert text_of(rest(api, request_id)) == expected_text(api)
        api.http.delete(f"/v1/requests/{request_id}")
        assert [event.data for event in reading][-2]["error"]["code"] == "duplicate_id"


def test_request_that_is_not_resumable_is_aborted_with_its_connection(slow: Driver) -> None:
    with site(slow.run_dir) as api:
        body = {**WANTED, "resumable": False, "stream": True, "max_tokens": 3000, "request_id": "f"}
        with api.http.stream("POST", PATH, json=body) as reply:
            next(iter(events(reply)))
        eventually(lambda: slow.stats()["summarize"]["live"] == 0, timeout=5)


def test_client_that_leaves_during_the_token_lookup_follows_nothing(slow: Driver) -> None:
    with site(slow.run_dir, reasoning_parser="think") as api:
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000, "resumable": True, "stream": True}
        with api.http.stream("POST", "/v1/chat/completions", json=asked) as reply:
            path = f"/v1/requests/{next(events(reply)).data['id']}"
        exchange = api.gateway.client._session._exchange
        eventually(lambda: not exchange.requests)
        with raw(api) as connection:
            connection.sendall(f"GET {path}?offset=2900 HTTP/1.1\r\nhost: a\r\n\r\n".encode())
            eventually(lambda: exchange.requests)
        eventually(lambda: not exchange.requests, timeout=5)
        assert api.http.delete(path).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"), [("cmpl-nobody", 404), ("other-x", 404), ("cmpl-x?offset=-1", 400), ("cmpl-x?offset=a", 400)]
)
def test_request_that_cannot_be_resumed_is_refused(slow: Driver, path: str, status: int) -> None:
    with site(slow.run_dir) as api:
        reply = api.http.get(f"/v1/requests/{path}")
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, "invalid_request_error")


def test_offset_beyond_the_answer_is_an_error(slow: Driver) -> None:
    with site(slow.run_dir) as api:
        whole = api.ask(PATH, **WANTED, request_id="g")
        found = rest(api, whole["id"], offset=1000)
        assert found[0].data["error"]["param"] == "num_tokens"
        api.http.delete(f"/v1/requests/{whole['id']}")


@pytest.mark.parametrize("n", [1, 2])
def test_resumable_request_survives_a_disconnect_before_its_acceptance(
    slow: Driver, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site(slow.run_dir) as api:
        client, streams = api.gateway.client, list[AsyncStream]()

        def submit(**asked: Any) -> AsyncStream:
            streams.append(AsyncClient.submit(client, **asked))
            return streams[-1]

        monkeypatch.setattr(client, "submit", submit)
        own_id = f"early-{os.urandom(4).hex()}"  # on a rerun, the test must not find its own earlier answer
        body = json.dumps({**WANTED, "n": n, "request_id": own_id}).encode()
        os.kill(prepare := slow.pids["prepare"] or 0, signal.SIGSTOP)
        with raw(api) as connection:
            connection.sendall(head_of(len(body)) + body)
            eventually(lambda: streams)
        eventually(lambda: api.gateway.counters.num_open == 0)
        os.kill(prepare, signal.SIGKILL)
        reply_id = f"cmpl-{own_id}" if n == 1 else f"cmpl.{n}-{own_id}"
        replies: list[tuple[int, str]] = []

        def is_answered() -> bool:
            reply = api.http.get(f"/v1/requests/{reply_id}?stream=false")
            replies.append((reply.status_code, reply.text[:200]))
            return reply.status_code == 200

        eventually(is_answered)
        api.http.delete(f"/v1/requests/{reply_id}")


@pytest.mark.parametrize("role", ["execute", "summarize"])
def test_pipeline_that_gave_up_does_not_report_an_answer_as_forgotten(role: str) -> None:
    """The next driver may still have it."""
    with Driver("hash-lm", hash_step_ms=4, max_restarts=0) as driver, site(driver.run_dir) as api:
        request_id, _ = begin(api, "h", num_events=3)
        os.kill(driver.pids[role] or 0, signal.SIGABRT)
        eventually(lambda: api.http.get("/health").json()["status"] == "failed")
        for unknown in (request_id if role == "summarize" else "cmpl-nobody", "cmpl-other"):
            for method in ("GET", "DELETE"):
                reply = api.http.request(method, f"/v1/requests/{unknown}")
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "failed")


class Failing:
    """A client of a pipeline in which a request fails as soon as it is followed."""

    async def status(self, request_id: str) -> RequestStatus:
        return RequestStatus(request_id, "running", 1, 1, None)

    def detach(self, *_: Any) -> None: ...

    def resume(self, request_id: str, **_: Any) -> AsyncStream:
        stream = AsyncStream(request_id, None, Mailbox(asyncio.get_running_loop()))  # type: ignore[arg-type]
        stream.abort = lambda: None  # type: ignore[method-assign]
        stream.on_end(Completion(request_id, "", [], "error", None, SUMMARY), DeadlineExceeded("too late"))
        return stream

    async def close(self) -> None: ...


def test_request_that_fails_during_its_deletion_is_deleted(slow: Driver) -> None:
    with site(slow.run_dir) as api:
        api.gateway.__dict__["client"] = Failing()
        assert api.http.delete("/v1/requests/cmpl-i").json()["deleted"] is True
