"""Proxies of this machine, with the settings of docs/how-to.md, in front of two replicas of which one drains."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.docs.pages import blocks
from tests.waiting import eventually

BODY = b"a body that arrives after its headers"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
LONG_BYTES = 100_000  # more than HAProxy keeps by default


class Replica(ThreadingHTTPServer):
    """Answers each request with ``status``; or, if that is 0, waits until its client has left."""

    daemon_threads = True

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = status
        self.was_asked, self.was_left = Event(), Event()


class Handler(BaseHTTPRequestHandler):
    server: Replica
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.was_asked.set()
        if self.server.status == 0:
            with suppress(ConnectionError):
                self.connection.recv(1)
            self.server.was_left.set()
            self.close_connection = True
            return
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def with_replicas(settings: str, ports: list[int]) -> str:
    """These settings with the replicas of this test."""
    for number, port in enumerate(ports, start=1):
        settings = settings.replace(f"10.0.0.{number}:8000", f"127.0.0.1:{port}")
    return settings


def nginx(folder: Path, ports: list[int]) -> list[str]:
    [site] = blocks("how-to.md", "nginx")
    text = re.sub(r"\n +ssl_.*|\n +server_name.*", "", site.text)
    text = with_replicas(text.replace("listen 443 ssl", f"listen unix:{folder}/front"), ports)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    (folder / "conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/log;\n"
        f"events {{}}\nhttp {{ access_log off;\n{folders}\n{text}\n}}"
    )
    return ["nginx", "-e", f"{folder}/log", "-p", str(folder), "-c", f"{folder}/conf"]


def haproxy(folder: Path, ports: list[int]) -> list[str]:
    [config] = blocks("how-to.md", "haproxy")
    text = with_replicas(re.sub(r"bind :443 .*", f"bind unix@{folder}/front", config.text), ports)
    (folder / "conf").write_text(text)
    return ["haproxy", "-db", "-f", f"{folder}/conf"]


@contextmanager
def running(*statuses: int) -> Iterator[list[Replica]]:
    replicas = [Replica(status) for status in statuses]
    threads = [Thread(target=replica.serve_forever, args=(0.05,)) for replica in replicas]
    for thread in threads:
        thread.start()
    try:
        yield replicas
    finally:
        for replica in replicas:
            replica.shutdown()
            replica.server_close()
        for thread in threads:
            thread.join()


@contextmanager
def in_front(command: list[str], folder: Path) -> Iterator[Callable[[], socket.socket]]:
    """A proxy, if it is installed; what is yielded connects to it."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not here")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield lambda: eventually(lambda: connected(folder / "front"))
        finally:
            process.kill()


def connected(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


PROXIES = pytest.mark.parametrize("configured", [nginx, haproxy], ids=["nginx", "haproxy"])


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("p")  # a short name: paths of sockets are limited


@PROXIES
@pytest.mark.parametrize("num_bytes", [len(BODY), LONG_BYTES], ids=["short", "long"])
def test_a_request_to_a_draining_replica_goes_to_the_other(
    configured: Callable[..., list[str]], num_bytes: int, folder: Path
) -> None:
    with running(503, 200) as replicas:
        command = configured(folder, [replica.server_port for replica in replicas])
        with in_front(command, folder) as connect:
            for _ in range(6):
                with connect() as connection:
                    connection.sendall(HEAD % num_bytes)
                    connection.sendall(BODY.ljust(num_bytes))
                    reply = HTTPResponse(connection)
                    reply.begin()
                    assert reply.status == 200
        assert replicas[0].was_asked.is_set()


@PROXIES
def test_a_client_that_leaves_a_whole_answer_ends_its_request(
    configured: Callable[..., list[str]], folder: Path
) -> None:
    with running(0) as [replica]:
        command = configured(folder, [replica.server_port] * 2)
        with in_front(command, folder) as connect:
            with connect() as connection:
                connection.sendall(HEAD % len(BODY) + BODY)
                assert replica.was_asked.wait(60)
            assert replica.was_left.wait(60)
