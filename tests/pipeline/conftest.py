"""Pipelines on the hash LM: everything except the arithmetic is real, and a wrong KV cell changes the text.

All modules share four pipelines, which end with the folder: one that only waits takes a second of processor time in
two minutes. Tests may kill workers in them, so what a test counts, such as restarts, must be counted from its own
beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pipeline.checks import assert_quiet
from triptych import Driver

SLOW_STEP_MS = 4.0


def hash_driver(*, model: str = "hash-lm", **options: Any) -> Driver:
    return Driver(model, **{"lease_s": 2.0, "max_restarts": 1000, **options})


@pytest.fixture(scope="package")
def _fast_pipeline() -> Iterator[Driver]:
    with hash_driver() as driver:
        yield driver


@pytest.fixture(scope="package")
def _slow_pipeline() -> Iterator[Driver]:
    with hash_driver(hash_step_ms=SLOW_STEP_MS, lease_s=30.0) as driver:
        yield driver


@pytest.fixture(scope="package")
def _narrow_pipeline() -> Iterator[Driver]:
    with hash_driver(hash_step_ms=5.0, max_num_seqs=1) as driver:
        yield driver


@pytest.fixture(scope="package")
def _prefill_pipeline() -> Iterator[Driver]:
    with hash_driver(prefill_chunk=4, hash_step_ms=4.0) as driver:
        yield driver


@pytest.fixture(scope="module")
def driver(_fast_pipeline: Driver) -> Iterator[Driver]:
    """A pipeline that steps as fast as it can; after the tests of a module it must be quiet."""
    yield _fast_pipeline
    assert_quiet(_fast_pipeline)


@pytest.fixture
def slow(_slow_pipeline: Driver) -> Iterator[Driver]:
    """A pipeline with steps of 4 ms, so that answers take long enough for their readers to reconnect."""
    yield _slow_pipeline
    assert_quiet(_slow_pipeline)


@pytest.fixture
def narrow(_narrow_pipeline: Driver) -> Iterator[Driver]:
    """One row, two credits, and steps slow enough to be watched."""
    yield _narrow_pipeline
    assert_quiet(_narrow_pipeline)


@pytest.fixture(scope="module")
def slow_prefill(_prefill_pipeline: Driver) -> Iterator[Driver]:
    """Prompts take a step of 4 ms for every four tokens, so that they can be interrupted."""
    yield _prefill_pipeline
    assert_quiet(_prefill_pipeline)
