"""The gatekeeper, which decides at each handshake whether a key is admitted."""

from __future__ import annotations

from pathlib import Path

import zmq

from tests.waiting import eventually
from triptych.protocol import messages as m
from triptych.protocol.channels import Connection, Router, ipc_endpoint
from triptych.protocol.curve import CurveServer, start_gatekeeper
from triptych.protocol.errors import ConfigError
from triptych.protocol.keys import ClientKeys, KeyPair


def test_after_a_key_that_could_not_be_looked_up_others_are_admitted(
    context: zmq.Context[zmq.Socket[bytes]], folder: Path
) -> None:
    asked: list[str] = []

    def allows(key: str) -> bool:
        asked.append(key)
        if key == asked[0]:
            raise ConfigError("no key file client.json: Too many open files")
        return True

    pair, endpoint = KeyPair.new(), ipc_endpoint(folder / "submit")
    server = CurveServer(None, pair.secret, allows)
    gatekeeper = start_gatekeeper(context, server)
    router = Router(context, endpoint, epoch=1, max_frame_bytes=1 << 20, public=server)
    first = connect(endpoint, pair.public)
    eventually(lambda: asked)
    second = connect(endpoint, pair.public)
    second.queue("submit", "a", m.GetInfo())

    def turn() -> object:
        second.wait(0.01)
        return router.recv()

    eventually(turn, interval=0)
    for connection in (first, second):
        connection.close()
    gatekeeper.stop()


def connect(endpoint: str, server: str) -> Connection:
    pair = KeyPair.new()
    return Connection(endpoint, endpoint, keys=ClientKeys("any", server, pair.public, pair.secret))
