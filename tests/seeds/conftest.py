"""Pipelines shared by all tests of this folder: each is started once, and must be quiet again after every test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.seeds.support import clean_up
from triptych import Driver

if TYPE_CHECKING:
    from tests.seeds.tiny_engine import TinyEngine


@pytest.fixture(scope="package")
def _fast_pipeline() -> Iterator[Driver]:
    with Driver("hash-lm", lease_s=60.0) as driver:
        yield driver


@pytest.fixture(scope="package")
def _slow_pipeline() -> Iterator[Driver]:
    with Driver("hash-lm", lease_s=8.0, hash_step_ms=5.0, max_num_seqs=2, max_queue=64, hang_s=20.0) as driver:
        yield driver


@pytest.fixture(scope="package")
def _small_pipeline() -> Iterator[Driver]:
    with Driver("hash-lm", lease_s=60.0, num_pages=12, page_size=4, max_num_seqs=4) as driver:
        yield driver


@pytest.fixture
def driver(_fast_pipeline: Driver) -> Iterator[Driver]:
    """The hash LM at full speed, with enough memory for all tests."""
    yield _fast_pipeline
    clean_up(_fast_pipeline)


@pytest.fixture
def slow(_slow_pipeline: Driver) -> Iterator[Driver]:
    """The hash LM at 5 ms per step, with two rows (so three live sequences) and a queue of 64."""
    yield _slow_pipeline
    clean_up(_slow_pipeline)


@pytest.fixture
def small(_small_pipeline: Driver) -> Iterator[Driver]:
    """The hash LM with twelve pages of four tokens and four rows: long answers preempt each other."""
    yield _small_pipeline
    clean_up(_small_pipeline)


@pytest.fixture
def demo(demo_driver: Driver) -> Iterator[Driver]:
    """The model that ships with the package: real text, and a chat template."""
    yield demo_driver
    clean_up(demo_driver)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    """A random Llama on pages, and the same checkpoint in transformers as its oracle."""
    from tests.seeds.tiny_engine import TinyEngine

    return TinyEngine(tmp_path_factory.mktemp("tiny"))
