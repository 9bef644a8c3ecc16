"""Makes Triton's interpreter faster, and its products independent of the other rows, as on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.conftest import HAS_GPU


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    if HAS_GPU or "triton" not in sys.modules:  # imported by the collected tests that use it
        yield
        return
    from tests.quick_interpreter import speed_up

    with pytest.MonkeyPatch.context() as patch:
        speed_up(patch)
        yield


@pytest.fixture
def rows_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies tiles with BLAS, which on some processors sums a row depending on its place in the
    tile.

    No GPU does that. Here the terms of each element are added in order.
    """
    if HAS_GPU:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        total = np.zeros_like(d.data)
        for term in range(a.data.shape[-1]):
            total += a.data[..., term, None] * b.data[..., term, None, :]
        return TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
