"""A stop ends in time and in order, even if clients do not read their replies."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.launch.gateway import conftest
from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.test_edge import raw
from tests.waiting import eventually
from triptych import Driver
from triptych.launch.gateway.serving import server
from triptych.launch.gateway.serving.address import listen

ASKED = b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n"  # a reply of 100 KB
NUM_ASKED = 20


@contextmanager
def with_small_buffers(address: str) -> Iterator[socket.socket]:
    with listen(address) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections inherit this
        yield listener


def test_connections_whose_clients_do_not_read_are_cut_at_a_stop(
    pipeline: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in (("GRACE_S", 1.0), ("LAST_ENDS_S", 0.8)):
        monkeypatch.setattr(server, name, seconds)
    monkeypatch.setattr(conftest, "listen", with_small_buffers)
    counts = [0]

    def is_stuck(api: Site) -> bool:
        counts.append(api.gateway.counters.requests.total())
        return 0 < counts[-2] == counts[-1] < NUM_ASKED

    with ExitStack() as later, site(pipeline.run_dir) as api:
        later.enter_context(raw(api)).sendall(NUM_ASKED * ASKED)
        eventually(lambda: is_stuck(api))
    assert "cutting 1 connections" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
