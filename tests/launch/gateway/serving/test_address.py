"""Addresses at which gateways are served."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import httpx2
import pytest

from tests.lost_packets import lose_packets
from triptych import Driver
from triptych.launch.gateway.config import GatewayConfig
from triptych.launch.gateway.serving import address
from triptych.launch.gateway.serving.address import listen, split_address, url_of
from triptych.launch.gateway.serving.processes import gateways, listening_for
from triptych.protocol.errors import ConfigError


def test_unix_socket_can_be_the_address(pipeline: Driver, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    config = GatewayConfig(http=f"unix:{path}")
    with listening_for(config) as listener, gateways(config, listener, pipeline.run_dir, log_level="error") as url:
        assert url == f"unix:{path}"
        transport = httpx2.HTTPTransport(uds=str(path))
        with httpx2.Client(base_url="http://gateway", transport=transport, timeout=60) as http:
            assert http.get("/version").status_code == 200
    assert not path.exists()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (":8000", ("127.0.0.1", 8000)),
        ("8000", ("127.0.0.1", 8000)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:2", ("::1", 2)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["", "host", "host:port", ":70000", "host:-1", "*:1", "unix:"])
def test_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="http is"):
        listen(address)


def test_name_that_no_host_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at a\.\.b:0: "):
        listen("a..b:0")


def test_occupied_address_is_refused_with_its_name() -> None:
    with listen(":0") as first:
        taken = url_of(first).removeprefix("http://")
        with pytest.raises(ConfigError, match=taken):
            listen(taken)


def test_host_is_served_at_the_address_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As localhost where the loopback interface has only one of 127.0.0.1 and ::1."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1")]
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with listen("localhost:0") as listener:
            assert url_of(listener).startswith("http://127.0.0.1:")
        found.pop()
        with pytest.raises(ConfigError, match="cannot listen at localhost:0: Cannot assign requested address"):
            listen("localhost:0")


def test_connection_of_a_machine_that_vanished_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SILENCE_S", "ASK_AGAIN_S", "NUM_QUESTIONS"):
        monkeypatch.setattr(address, name, 1)
    with listen(":0") as listener, socket.create_connection(listener.getsockname()), listener.accept()[0] as silent:
        lose_packets(silent.fileno())
        silent.settimeout(20)
        with pytest.raises(TimeoutError) as ended:
            silent.recv(1)
    assert ended.value.errno == errno.ETIMEDOUT
