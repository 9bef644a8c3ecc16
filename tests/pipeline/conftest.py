"""Pipelines on the hash LM: everything is real but the arithmetic, and a wrong cell changes the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pipeline.checks import assert_quiet
from triptych import Driver


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """One pipeline for the tests of a module; after them nothing may be left in it."""
    with Driver("hash-lm", lease_s=2.0, max_restarts=1000) as driver:
        yield driver
        assert_quiet(driver)


def hash_driver(*, model: str = "hash-lm", **options: Any) -> Driver:
    return Driver(model, **{"lease_s": 2.0, "max_restarts": 1000, **options})
