"""A client, and a fake service that sends it what the test says."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.fake_service import REPEAT_S, FakeService
from triptych import Driver
from triptych.driver import exchange
from triptych.driver.session import Session


@pytest.fixture
def service() -> Iterator[FakeService]:
    with tempfile.TemporaryDirectory() as folder:  # with a path short enough for a socket
        service = FakeService(Path(folder))
        yield service
        service.close()


@pytest.fixture
def fast_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client repeats unanswered messages after a short time."""
    monkeypatch.setattr(exchange, "REPEAT_S", REPEAT_S)


@pytest.fixture
def session(service: FakeService) -> Iterator[Session]:
    session = service.client()
    yield session
    session.close()


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """A small service that is easily full: two rows, and a queue of four requests."""
    with Driver("hash-lm", max_num_seqs=2, max_queue=4, hash_step_ms=1) as driver:
        yield driver
