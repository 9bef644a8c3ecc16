"""Over the network, only holders of listed keys are served; without keys, there are no network endpoints."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.pipeline.checks import expected
from tests.pipeline.conftest import hash_driver
from tests.ports import free_endpoint
from tests.waiting import eventually
from triptych import Client, Driver
from triptych.protocol import messages as m
from triptych.protocol.curve import new_key_pair
from triptych.protocol.errors import (
    ConfigError,
    DuplicateId,
    Overloaded,
    PipelineFailed,
    RequestTimeout,
    UnknownRequest,
)
from triptych.protocol.keys import ClientKeys, KeyFolder

UNHEARD_S = 1.5  # long enough for a permitted client to be answered


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> KeyFolder:
    folder = KeyFolder(tmp_path_factory.mktemp("secrets") / "keys")
    folder.create()
    return folder


@pytest.fixture(scope="module")
def driver(folder: KeyFolder) -> Iterator[Driver]:
    endpoints = {"submit": free_endpoint(), "follow": free_endpoint()}
    with hash_driver(curve_keys=str(folder.path), max_client_requests=3, max_num_seqs=1, **endpoints) as driver:
        yield driver


def connect(driver: Driver, keys: ClientKeys | Path) -> Client:
    service = driver.config.service
    return Client(submit=service.submit, follow=service.follow, keys=keys)


def is_answered(client: Client) -> bool:
    try:
        return bool(client.info(UNHEARD_S))
    except RequestTimeout:
        return False


def test_local_driver_and_owner_are_served_as_usual(driver: Driver) -> None:
    assert driver.generate([4, 5], max_tokens=3).token_ids == expected([4, 5], 3)
    with Client(driver.run_dir) as client:
        assert client.generate([4, 5], max_tokens=3).token_ids == expected([4, 5], 3)


def test_listed_key_is_served_over_tcp(driver: Driver, folder: KeyFolder, tmp_path: Path) -> None:
    folder.add("alice").write(tmp_path / "alice.json")
    with connect(driver, tmp_path / "alice.json") as client:
        assert client.generate([7, 8], max_tokens=5).token_ids == expected([7, 8], 5)


def test_unlisted_key_gets_no_answer(driver: Driver, folder: KeyFolder) -> None:
    stranger = KeyFolder(folder.path.parent / "another")
    stranger.create()
    keys = stranger.add("mallory")
    with connect(driver, ClientKeys(keys.name, folder.server.public, keys.public, keys.secret)) as client:
        assert not is_answered(client)


def test_client_that_expects_another_server_key_does_not_connect(driver: Driver, folder: KeyFolder) -> None:
    keys = folder.add("bob")
    with connect(driver, ClientKeys(keys.name, keys.public, keys.public, keys.secret)) as client:
        assert not is_answered(client)


def test_revoked_key_can_no_longer_connect(driver: Driver, folder: KeyFolder) -> None:
    keys = folder.add("carol")
    with connect(driver, keys) as client:
        assert is_answered(client)
    folder.revoke("carol")
    with connect(driver, keys) as client:
        assert not is_answered(client)


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_unencrypted_client_gets_no_answer(driver: Driver, transport: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(str(driver.config.service.submit) if transport == "tcp" else f"ipc://{driver.run_dir}/submit")
        dealer.send(b"\x94\x02\x01\x00\x00")  # GET_INFO
        assert not dealer.poll(int(UNHEARD_S * 1000))


def test_random_bytes_on_the_port_disturb_no_one(driver: Driver) -> None:
    host, _, port = str(driver.config.service.submit).removeprefix("tcp://").rpartition(":")
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + b"\x00" * 64, b"\xff\xff" * 5000):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(noise)
    assert driver.generate([1], max_tokens=1).token_ids == expected([1], 1)


def test_quota_counts_per_key_and_not_per_connection(driver: Driver, folder: KeyFolder) -> None:
    keys = folder.add("dave")
    with connect(driver, keys) as one, connect(driver, keys) as other:
        streams = [client.submit([1, 2], max_tokens=3000) for client in (one, other, one)]
        for stream in streams:
            stream.accepted(10)
        with pytest.raises(Overloaded, match="max_client_requests"):
            other.submit([3], max_tokens=1).accepted(10)
        assert driver.submit([3], max_tokens=1).accepted(10)
        for stream in streams:
            stream.abort()
        eventually(lambda: answered(other))


def test_request_belongs_to_the_key_that_submitted_it(driver: Driver, folder: KeyFolder) -> None:
    keys = [folder.add(name) for name in ("erin", "frank")]
    with connect(driver, keys[0]) as erin, connect(driver, keys[0]) as again, connect(driver, keys[1]) as frank:
        stream = erin.submit([1, 2], max_tokens=3000, request_id="private")
        next(iter(stream))
        assert [ids_of(client) for client in (again, frank)] == [["private"], []]
        abort = m.Abort("private")
        frank.session._order(lambda: frank.session._connection.queue("follow", "abort", abort))
        with pytest.raises(UnknownRequest):
            frank.resume("private").result(20)
        with pytest.raises(DuplicateId):
            frank.submit([1, 2], max_tokens=3000, request_id="private").accepted(20)
        assert frank.status("private").state == "unknown"
        assert again.status("private").state == "running"
        assert ids_of(driver.client) == ["private"]  # whoever can read the run directory sees all requests
        stream.abort()
        assert stream.result(20).finish_reason == "abort"
        assert [frank.requests().ended, again.requests().ended[0].request_id] == [[], "private"]


def ids_of(client: Client) -> list[str]:
    return [line.request_id for line in client.requests().lines if line.state != "ended"]


def test_while_prepare_is_given_up_refusals_are_sent_to_holders_of_keys_only(folder: KeyFolder) -> None:
    keys = folder.add("late")
    stranger = ClientKeys("stranger", keys.server, *new_key_pair())
    endpoints = {"submit": free_endpoint(), "follow": free_endpoint()}
    with hash_driver(curve_keys=str(folder.path), max_restarts=0, **endpoints) as driver:
        os.kill(eventually(lambda: driver.pids["prepare"]), signal.SIGABRT)
        eventually(lambda: driver.health().status == "failed")
        with Client(**endpoints, keys=keys) as client, pytest.raises(PipelineFailed):
            client.submit([1], max_tokens=1).result(20)
        with Client(**endpoints, keys=stranger) as client:
            assert not is_answered(client)
    folder.revoke("late")


def answered(client: Client) -> bool:
    try:
        return bool(client.generate([3], max_tokens=1, timeout=10).token_ids)
    except Overloaded:
        return False


BAD_ENDPOINTS: dict[str, tuple[dict[str, Any], str]] = {
    "no keys": ({"submit": "tcp://127.0.0.1:5000"}, "curve_keys"),
    "every address": ({"submit": "tcp://*:5000", "curve_keys": "k"}, "give a single address"),
    "every address of IPv4": ({"follow": "tcp://0.0.0.0:5000", "curve_keys": "k"}, "give a single address"),
    "every address of IPv6": ({"follow": "tcp://[::]:5000", "curve_keys": "k"}, "give a single address"),
    "no port": ({"submit": "tcp://127.0.0.1", "curve_keys": "k"}, "tcp://HOST:PORT"),
    "another transport": ({"submit": "udp://127.0.0.1:5000", "curve_keys": "k"}, "tcp://HOST:PORT"),
}


@pytest.mark.parametrize(("options", "text"), BAD_ENDPOINTS.values(), ids=BAD_ENDPOINTS.keys())
def test_unprotected_or_malformed_endpoint_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Driver("hash-lm", **options)


def test_keys_readable_by_others_prevent_the_start(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.create()
    (folder.path / "server.json").chmod(0o644)
    with pytest.raises(ConfigError, match="readable by its owner only"):
        hash_driver(curve_keys=str(folder.path), submit=free_endpoint(), follow=free_endpoint()).start()
