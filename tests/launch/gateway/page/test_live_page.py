"""The live page, from the bytes that the gateway sends."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.sse import events
from tests.waiting import eventually
from triptych import Driver
from triptych.launch.gateway.page import feed as feed_module
from triptych.launch.gateway.page.document import document
from triptych.launch.gateway.page.feed import Feed
from triptych.protocol.messages import LEDGER_STAGES

PATH = "/ui/events"


@contextmanager
def watching(api: Site, **headers: str) -> Iterator[Iterator[Any]]:
    """The frames of one viewer."""
    with api.http.stream("GET", PATH, headers=headers) as reply:
        assert reply.status_code == 200, reply.read()
        yield (event.data for event in events(reply))


def first_frame(api: Site) -> dict[str, Any]:
    with watching(api) as frames:
        return dict(next(frames))


def frame_with(frames: Iterator[Any], request_id: str, where: str) -> dict[str, Any]:
    """The first frame that has the request in ``where``, as a map of its columns."""
    for frame in frames:
        for row in frame[where]:
            if row[0] == request_id:
                return {**frame, "row": dict(zip(frame["columns"], row, strict=True))}
    raise AssertionError("the stream ended")


def test_page_is_one_document_without_external_resources(api: Site) -> None:
    reply = api.http.get("/")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert reply.content == document().body
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert re.fullmatch(r"'sha256-[\w+/=]+'", policy["script-src"])
    assert set(re.findall(r'(?:src|href)="([^":]*)', reply.text)) == {"#requests", "data"}
    assert "/* s" not in reply.text  # every placeholder was filled in


def test_frame_shows_the_stages_the_steps_and_the_pages() -> None:
    # Slow, because there are two frames a second, and the request must still run when its steps are shown.
    with Driver("hash-lm", hash_step_ms=5.0) as driver, site(driver.run_dir) as api, watching(api) as frames:
        stream = driver.submit("a secret prompt", request_id="framed", max_tokens=2000)
        frame = frame_with(frames, "framed", "requests")
        while not frame["steps"] or not frame["pages"]["held"]:
            frame = frame_with(frames, "framed", "requests")
        stream.abort()
        ended = frame_with(frames, "framed", "ended")
    assert list(frame["panels"]) == ["prepare", "execute", "summarize"]
    assert all(panel["healthy"] and panel["figures"] for panel in frame["panels"].values())
    assert frame["row"]["state"] in ("queued", "prefill", "decode")
    assert (ended["row"]["state"], len(ended["row"]["stages_ms"])) == ("abort", len(LEDGER_STAGES))
    assert len(frame["steps"]["ms"]) == len(frame["steps"]["decodes"]) > 0
    cells = frame["pages"]["runs"][1::2]
    assert sum(cells) * frame["pages"]["pages_per_cell"] >= frame["pages"]["num_pages"]
    assert "secret" not in json.dumps([frame, ended])


def test_page_is_public_and_its_frames_require_the_key(pipeline: Driver) -> None:
    with site(pipeline.run_dir, api_key="open sesame") as api:
        assert api.http.get("/").status_code == 200
        for path in (PATH, PATH + "?key=open%20sesame", PATH + "?api_key=open%20sesame"):
            assert api.http.get(path).status_code == 401
        with watching(api, authorization="Bearer open sesame") as frames:
            assert "sesame" not in json.dumps(next(frames))


def test_all_viewers_share_one_poller_that_stops_with_the_last(
    pipeline: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_at, look = [], Feed._look

    def counted(feed: Feed, *arguments: Any) -> Any:
        looks_at.append(time.monotonic())
        return look(feed, *arguments)

    monkeypatch.setattr(Feed, "_look", counted)
    with site(pipeline.run_dir) as api:
        assert (api.gateway.feed._poller, looks_at) == (None, [])
        with watching(api) as one, watching(api) as two, watching(api) as three:
            for frames in (one, two, three) * 3:
                next(frames)
            assert len(looks_at) <= (time.monotonic() - looks_at[0]) / feed_module.INTERVAL_S + 2
        eventually(lambda: api.gateway.feed._poller is None)
        looks_at.clear()
        first_frame(api)
        assert looks_at


def test_viewers_beyond_the_limit_are_refused(pipeline: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 1)
    with site(pipeline.run_dir) as api:
        with watching(api) as frames:
            next(frames)
            reply = api.http.get(PATH)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "too_many_viewers")
        eventually(lambda: api.gateway.feed._poller is None)
        first_frame(api)


def test_viewer_does_not_prevent_a_gateway_from_stopping(pipeline: Driver) -> None:
    with httpx2.Client(timeout=30, trust_env=False) as viewer:
        with site(pipeline.run_dir) as api:
            reply = viewer.send(viewer.build_request("GET", api.url + PATH), stream=True)
            frames = events(reply)
            next(frames)
            began = time.monotonic()
        assert time.monotonic() - began < 4
        for _ in frames:  # the stream has an end
            pass


# A model that is being loaded is watched in test_health.py.
