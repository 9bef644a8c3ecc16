from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def context() -> Iterator[Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)
