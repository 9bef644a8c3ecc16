"""A pipeline of the hash model and a gateway in front of it, in this process, at a free port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.pipeline.checks import assert_quiet
from tests.waiting import eventually
from triptych import Driver
from triptych.launch.gateway.config import GatewayConfig
from triptych.launch.gateway.serving.address import listen, url_of
from triptych.launch.gateway.serving.server import make_gateway, make_server
from triptych.launch.gateway.state import Gateway


@dataclass
class Site:
    """A served gateway and a client of it."""

    url: str
    gateway: Gateway
    http: httpx2.Client
    driver: Driver | None = None

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """The reply to a request that must succeed."""
        reply = self.post(path, **body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def refusal(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that must fail."""
        reply = self.post(path, **body)
        assert reply.status_code >= 400, reply.text
        return reply.status_code, reply.json()["error"]


@contextmanager
def site(run_dir: Path, **options: Any) -> Iterator[Site]:
    """A gateway for the pipeline in ``run_dir``."""
    gateway = make_gateway(GatewayConfig(**options), run_dir)
    server = make_server(gateway)
    with listen("127.0.0.1:0") as listener:
        url = url_of(listener, is_tls=gateway.config.is_tls)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            eventually(lambda: server.started and "client" in vars(gateway))  # it is opened last
            opened = gateway.client
            # Without certificates, which plain HTTP does not use: reading them takes longer than to make a gateway.
            with httpx2.Client(base_url=url, timeout=30, trust_env=False, verify=False) as http:
                yield Site(url, gateway, http)
            gateway.__dict__["client"] = opened  # a test may have put its own in place of it
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
            gateway.board.close()


@pytest.fixture(scope="package")
def pipeline() -> Iterator[Driver]:
    with Driver("hash-lm", lease_s=5.0, max_restarts=1000) as driver:
        yield driver
        assert_quiet(driver)


@pytest.fixture(scope="package")
def slow() -> Iterator[Driver]:
    """4 ms per token, so that readers can leave before the end, and something is left to resume."""
    with Driver("hash-lm", hash_step_ms=4, lease_s=60, max_restarts=1000) as driver:
        yield driver


@pytest.fixture(scope="package")
def _shared_api(pipeline: Driver) -> Iterator[Site]:
    with site(pipeline.run_dir, tool_parser="hermes") as api:
        api.driver = pipeline
        yield api


@pytest.fixture
def api(_shared_api: Site) -> Site:
    """A gateway of the hash model, shared by all tests."""
    return _shared_api


@pytest.fixture(scope="package")
def _shared_thinking(pipeline: Driver) -> Iterator[Site]:
    with site(pipeline.run_dir, reasoning_parser="think", tool_parser="hermes") as api:
        yield api


@pytest.fixture
def thinking(_shared_thinking: Site) -> Site:
    """A gateway that treats the hash model as a reasoning model."""
    return _shared_thinking


@pytest.fixture(scope="package")
def _shared_demo(demo_driver: Driver) -> Iterator[Site]:
    with site(demo_driver.run_dir) as api:
        yield api


@pytest.fixture
def demo(_shared_demo: Site) -> Site:
    """A gateway of the model that ships with the package."""
    return _shared_demo


@pytest.fixture
def scripted(pipeline: Driver) -> Iterator[Site]:
    """A gateway of its own, whose client a test replaces by ``scripted.script``."""
    with site(pipeline.run_dir, tool_parser="hermes") as api:
        yield api
