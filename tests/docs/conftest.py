"""One pipeline shared by all pages that need a running one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from triptych import Driver


@pytest.fixture(scope="package")
def driver() -> Iterator[Driver]:
    with Driver("hash-lm", max_model_len=256) as driver:
        yield driver
