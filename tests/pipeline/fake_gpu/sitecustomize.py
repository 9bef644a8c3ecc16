"""Gives execute a CUDA device that needs no GPU. Python imports this by itself where the folder is on PYTHONPATH."""

from __future__ import annotations

import sys

if "triptych.workers.execute" in " ".join(sys.orig_argv):
    import tests.conftest  # noqa: F401, I001 # lets Triton interpret kernels, before any is defined

    import pytest

    from tests.fake_cuda import fake_cuda
    from tests.quick_interpreter import speed_up
    from tests.workers.execute.model.draft.small import shrink_draft_steps
    from tests.workers.execute.model.fused.short_self_test import shorten_self_test
    from triptych.workers.execute.model.device import check_costs, runner
    from triptych.workers.execute.model.draft.device import DraftRunner

    patch = pytest.MonkeyPatch()
    shrink_draft_steps(patch)
    for name in ("decode_s", "best_seconds_of"):  # as if it were much smaller
        patch.setattr(DraftRunner, name, lambda *_: 0.0)
    # Measured on a busy machine, guesses may seem to cost more than they gain.
    patch.setattr(runner, "measure_check_costs", lambda *_, **_sizes: check_costs.EXPECTED)
    shorten_self_test(patch)
    speed_up(patch)
    device = fake_cuda(patch)
    device.__enter__()  # for the rest of the process
