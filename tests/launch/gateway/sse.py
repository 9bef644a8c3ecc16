"""Server-sent events, parsed exactly by their specification."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx2


class Event(NamedTuple):
    data: Any  # "[DONE]", or the decoded JSON
    id: str | None
    name: str | None


def events(reply: httpx2.Response) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in reply.iter_lines():
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            assert name in ("data", "id", "event"), line
            fields[name] = value
        elif fields:
            data = fields["data"] if fields["data"] == "[DONE]" else json.loads(fields["data"])
            yield Event(data, fields.get("id"), fields.get("event"))
            fields = {}
    assert not fields, "the stream ended inside an event"


def stream(http: httpx2.Client, path: str, **body: Any) -> list[Event]:
    """All events of a streamed reply that must succeed."""
    with http.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        return list(events(reply))


def text_of(found: list[Event], index: int = 0) -> str:
    """The text of one choice."""
    choices = [c for e in found if e.data != "[DONE]" for c in e.data["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)
