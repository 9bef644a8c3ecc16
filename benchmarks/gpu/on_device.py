"""A pytest plugin: no test runs if kernels would be interpreted, because it would pass and prove nothing."""

from __future__ import annotations

import os

import pytest
import torch


def pytest_sessionstart() -> None:  # also called in the process that distributes tests
    from tests.conftest import HAS_GPU

    why = [
        "torch sees no CUDA device" * (not torch.cuda.is_available()),
        "tests take the machine for one without a GPU: /dev/nvidiactl is missing" * (not HAS_GPU),
        "TRITON_INTERPRET is set" * (os.environ.get("TRITON_INTERPRET", "0") != "0"),
    ]
    if any(why):
        pytest.exit(f"nothing was proven: {', '.join(filter(None, why))}", returncode=9)
