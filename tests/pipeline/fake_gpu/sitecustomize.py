"""Gives execute a CUDA device that needs no GPU. Python imports this by itself where the folder is on PYTHONPATH."""

from __future__ import annotations

import sys

if "triptych.workers.execute" in " ".join(sys.orig_argv):
    import tests.conftest  # noqa: F401, I001 # lets Triton interpret kernels, before any is defined

    import pytest

    from tests.fake_cuda import fake_cuda
    from tests.quick_interpreter import speed_up
    from tests.workers.execute.model.fused.short_self_test import shorten_self_test

    patch = pytest.MonkeyPatch()
    shorten_self_test(patch)
    speed_up(patch)
    device = fake_cuda(patch)
    device.__enter__()  # for the rest of the process
